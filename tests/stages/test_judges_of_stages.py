"""Another judge for a single stage (config.judge), and a stage that continues after its judge was corrected."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.registry.stages import STAGES
from jaxalign.stages.shared import judges
from tests.small_run import read, rows, run

BREVITY = f"{pathlib.Path(__file__).parents[1] / 'extending' / 'plugins' / 'judge.py'}:Brevity"
COMPARES = f"{pathlib.Path(__file__).parents[1] / 'extending' / 'plugins' / 'judge.py'}:NotANumber"
OWN = {"stages": ("revise", "sft", "compare", "evaluate"), "model": {"source": "huggingface", "path": "x"},
       "data": {"source": "prompts_jsonl", "red_team": "a.jsonl", "style": "chat"}, "feedback": {"judge": BREVITY}}
BROKEN = """
from jaxalign.feedback.judge import Verdict

class Judge:
    def compare(self, requests, draw):
        if max(draw.rows) >= 16:
            raise SystemExit("out of credit")
        return [Verdict(0.25 if request.first < request.second else 0.75) for request in requests]
"""


@pytest.mark.parametrize(("changes", "message"), [
    ({"judge": {"revise": COMPARES}}, "config.judge.revise is .*NotANumber', which has no method 'critique'; stage revise"),
    ({"judge": {"compare": "locall"}}, "config.judge.compare is 'locall'"),
    ({"judge": {"compare": "model"}}, "config.judge.compare is 'model', but config.judge.path is empty"),
    ({"judge": {"path": ("x",)}}, "config.judge.path is x, but no stage asks this judge"),
    ({"feedback": {"judge_stage": "ppo"}}, "config.feedback.judge_stage is 'ppo', but no stage after it asks the local judge"),
    ({"feedback": {"judge": COMPARES}}, "config.feedback.judge is .*NotANumber', which has no method 'critique'"),
    ({"feedback": {"judge": "http://localhost:8000/v1"}},
     "config.feedback.judge is 'http://localhost:8000/v1', a URL; set it to 'endpoint', and config.endpoint.url to "),
    ({"judge": {"evaluate": "HTTPS://api.example.com"}}, "config.judge.evaluate is 'HTTPS://api.example.com', a URL"),
    ({"judge": {"retries": -1}}, "config.judge.retries"),
])
def test_a_judge_that_a_stage_cannot_use_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        from_config_dict(OWN | changes)


def test_a_judge_for_one_stage_needs_only_the_methods_of_that_stage():
    config = from_config_dict(OWN | {"judge": {"compare": COMPARES, "evaluate": COMPARES}})
    assert judges.compares(config)
    config = from_config_dict(OWN | {"feedback": {"judge": COMPARES}, "judge": {"revise": BREVITY}})
    assert judges.compares(config)


def test_thoughts_can_be_set_for_a_judge_that_only_evaluates():
    feedback = {"judge": "model", "reasoning": True, "thinking": "on"}
    data = {"source": "preferences_jsonl", "train": "a.jsonl", "style": "chat"}
    asked = {"stages": ("sft", "evaluate"), "feedback": feedback, "judge": {"path": ("x",)}}
    config = from_config_dict(OWN | asked | {"data": data})
    assert judges.compares(config)


def test_a_malformed_form_of_answers_is_refused_before_the_run(tmp_path):
    shutil.copytree(pathlib.Path(judges.__file__).parents[2] / "feedback" / "templates" / "world", tmp_path / "own")
    (tmp_path / "own" / "form.json").write_text('{"layout": "markers", "options": ["(A)"]}')
    config = from_config_dict({"feedback": {"templates": str(tmp_path / "own")}})
    with pytest.raises(UserError, match='"options" in form.json of the template set .*own is .* a list of 2 strings'):
        judges.feedback_files(config, "revise")


def test_the_file_of_a_judge_belongs_to_the_stages_that_ask_it(tmp_path):
    def fields(stage):
        return set(judges.feedback_files(config, stage).values())

    config = from_config_dict(OWN | {"judge": {"compare": COMPARES}})
    assert [fields(stage) for stage in ("revise", "compare", "evaluate", "online_dpo", "ppo")] == [
        {"feedback.judge"}, {"judge.compare"}, *[{"feedback.judge"}] * 3
    ]
    config = from_config_dict({"judge": {"evaluate": BREVITY}})
    assert [fields(stage) for stage in ("revise", "compare", "evaluate")] == [set(), set(), {"judge.evaluate"}]


def test_only_the_stage_depends_on_its_judge():
    readers = {field: [record.name for record in STAGES if f"judge.{field}" in record.load("stage").config_fields]
               for field in ("revise", "compare", "evaluate", "retries", "max_failed_share")}
    assert readers == {"revise": ["revise"], "compare": ["compare"], "evaluate": ["evaluate"],
                       "retries": [], "max_failed_share": []}  # So a run may be resumed with other limits.


@pytest.mark.slow
def test_a_stage_continues_after_its_judge_was_corrected(done, tmp_path, capsys):
    for stage in ("pretrain", "revise", "sft"):
        shutil.copytree(done / stage, tmp_path / stage)
    path = tmp_path / "judge.py"
    path.write_text(BROKEN)
    own = {"stages": ("pretrain", "revise", "sft", "compare"), "judge": {"compare": f"{path}:Judge", "retries": 1},
           "feedback": {"principles_per_comparison": 1, "correct_position": False},
           "compare": {"prompts": 24, "batch": 2, "max_new_tokens": 24}}  # Three parts of eight pairs.
    message = r"it raised SystemExit at .*judge\.py:7 in 'compare': out of credit\), more than config.judge"
    with pytest.raises(UserError, match=message):
        run(tmp_path, **own)
    before = rows(tmp_path, "compare")
    assert len(before) == 16 and read(tmp_path / "compare" / "manifest.json")["status"] == "running"
    path.write_text(BROKEN.replace("max(draw.rows) >= 16", "False").replace("0.25", "0.1").replace("0.75", "0.9"))
    run(tmp_path, **own)
    out = capsys.readouterr().out
    assert "[compare] judge.py has changed since this stage began; its finished rows are kept" in out
    assert "[revise] done, nothing to compute" in out
    after = rows(tmp_path, "compare")
    values = [{row["label_ab"] for row in part if row["label_ab"] is not None} for part in (after[:16], after[16:])]
    assert [row["labels"] for row in after[:16]] == [row["labels"] for row in before]
    assert values[0] <= {0.25, 0.75} and values[1] <= {0.1, 0.9} and all(values)
    assert str(path) in read(tmp_path / "compare" / "manifest.json")["files"]
    path.write_text(BROKEN)
    with pytest.raises(UserError, match="the content of .*judge.py has changed"):
        run(tmp_path, **own)
