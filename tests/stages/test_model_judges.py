"""Language models as judges: the run's own base, an earlier stage, another folder, and a jury, from revise to the report."""

from __future__ import annotations

import gc
import gzip
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

import jaxalign as ja
from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.errors import UserError
from jaxalign.pipeline.graph import load_stage
from jaxalign.stages.shared.base import StageContext
from tests.folders import write_model

STAGES = ("revise", "sft", "compare", "preference", "ppo", "evaluate", "report")
SIZES = {"batch": 16, "max_new_tokens": 24}
CONSTANT = {"optimizer": {"schedule": "constant"}}  # Runs with other numbers of rows then share their programs.


@pytest.fixture(scope="module")
def root(tmp_path_factory, real_data, few_sampling_programs) -> pathlib.Path:
    """Two random ChatML models with different tokenizers' files, whose answers are noise, and questions of HH-RLHF of similar
    lengths, for which few programs are compiled."""
    root = tmp_path_factory.mktemp("judges")
    for name in ("policy", "judge"):
        write_model(root / name, max_length=1024)
    with gzip.open(real_data / "hh-rlhf" / "harmless-base-test.jsonl.gz", "rt", encoding="utf-8") as file:
        lines = [line for line in file if 40 <= len(json.loads(line)["chosen"].partition("\n\nAssistant:")[0]) < 60]
    (root / "harmless.jsonl").write_text("".join(line for line in lines if line.count("Human:") == 2), encoding="utf-8")
    shutil.copytree(root / "judge", root / "scorer")
    raw = read(root / "scorer" / "config.json") | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (root / "scorer" / "config.json").write_text(json.dumps(raw))
    return root


def config(root, **changes):
    """All stages. Stages revise and compare have two chunks of rows."""
    given = {
        "stages": STAGES, "compile_cache": None,
        "model": {"source": "huggingface", "path": str(root / "policy"), "max_length": 128},
        "data": {"source": "prompts_jsonl", "held_out_share": 0.2, "red_team": str(root / "harmless.jsonl")},
        "feedback": {"judge": "local", "max_outside_mass": 1.0, "undecided_margin": 0.0, "undecided": "half",
                     "consistent": False, "correct_position": False, "second_order": "always", "aggregate": "mean",
                     "principles_per_comparison": 1, "share_prefix": False},
        "judge": {"max_length": 1024},
        "revise": SIZES | {"rounds": 1, "red_team_prompts": 32}, "compare": SIZES | {"prompts": 32},
        "sft": CONSTANT | {"batch_rows": 2, "row_length": 128, "keep": ("unchanged", "grown", "cut_off"), "required_rows": 2},
        "preference": CONSTANT | {"members": 1, "batch": 8, "max_length": 128},
        "ppo": {"iterations": 1, "batch": 8, "minibatches": 2, "prompts": 16, "max_new_tokens": 8,
                "checks": {"step_zero": False}},
        "evaluate": SIZES | {"prompts": 8, "win_rate_prompts": 4},
    }
    for name, value in changes.items():
        given[name] = given.get(name, {}) | value if isinstance(value, dict) else value
    return from_config_dict(given)


def judged(root, judge=(), **changes):
    """The same, judged by another folder."""
    judge = {"path": (str(root / "judge"),)} | dict(judge)
    return config(root, feedback={"judge": "model"}, judge=judge, **changes)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def rows(folder):
    return [json.loads(line) for path in sorted(folder.glob("rows-*.jsonl")) for line in open(path)]


@pytest.fixture(scope="module")
def local(root):
    """The work directory of a finished run up to the preference model, whose base judges itself. Tests must not change it."""
    pipeline.run(config(root, stages=STAGES[:4]), root / "local")
    return root / "local"


@pytest.fixture(scope="module")
def other(root):
    """The same with another folder as the judge, and with all stages."""
    pipeline.run(judged(root), root / "other")
    return root / "other"


@pytest.mark.slow
def test_a_chat_model_goes_from_revise_to_the_report(other):
    assert (other / "report.html").exists()
    compared = read(other / "compare" / "summary.json")
    assert compared["pairs"] == 32 and 0 < compared["outside_mass"] <= 1 and compared["unparsable"] == 0
    assert [found["total"] for found in read(other / "summary.json")["win_rates"]] == [4, 4, 4]
    assert all(row["critique"] is not None for row in rows(other / "revise"))


@pytest.mark.slow
def test_a_judge_that_equals_the_base_gives_the_same_verdicts(local, other):
    """Both folders have the same weights and tokenizer."""
    assert rows(local / "revise") == rows(other / "revise") and rows(local / "compare") == rows(other / "compare")


@pytest.mark.slow
def test_a_jury_averages_its_members_and_records_their_disagreement(root, local, tmp_path):
    folders = (str(root / "judge"), str(local / "sft"))
    changes = {"feedback": {"judge": "model"}, "stages": ("compare", "preference"), "compare": {"prompts": 16}}
    found = {}
    for name, path in (("jury", folders), ("first", folders[:1]), ("second", folders[1:])):
        pipeline.run(config(root, judge={"path": path}, **changes), tmp_path / name)
        found[name] = rows(tmp_path / name / "compare")
    for jury, first, second in zip(*found.values(), strict=True):
        if jury["response_a"] == jury["response_b"]:
            continue
        for order in ("label_ab", "label_ba"):
            assert jury[order] == pytest.approx((first[order] + second[order]) / 2, abs=1e-6)
        apart = max(abs(first["label_ab"] - second["label_ab"]), abs(first["label_ba"] - second["label_ba"]))
        assert jury["disagreement"] == pytest.approx(apart, abs=1e-6)


@pytest.mark.slow
def test_the_model_of_an_earlier_stage_judges(root, local, tmp_path):
    """feedback.judge_stage=sft gives the verdicts of the folder of sft."""
    changes = {"stages": ("revise", "sft", "compare", "preference"), "revise": {"red_team_prompts": 16},
               "compare": {"prompts": 16}}
    pipeline.run(config(root, feedback={"judge_stage": "sft"}, **changes), tmp_path / "stage")
    judge = {"path": (str(tmp_path / "stage" / "sft"),), "compare": "model"}
    pipeline.run(config(root, judge=judge, **changes), tmp_path / "folder")
    labels = [[(row["label_ab"], row["label_ba"]) for row in rows(tmp_path / name / "compare")] for name in ("stage", "folder")]
    np.testing.assert_allclose(*labels, atol=1e-6)


@pytest.mark.slow
def test_a_run_that_was_killed_while_the_judge_answered_gives_the_same_rows(root, other, tmp_path):
    """One chunk of each stage is removed, as after a crash, and the stage is marked as unfinished."""
    shutil.copytree(other, tmp_path / "run")
    for stage in ("revise", "compare"):
        folder = tmp_path / "run" / stage
        manifest = read(folder / "manifest.json")
        (folder / "manifest.json").write_text(json.dumps(manifest | {"status": "running"}))
        (folder / "rows-00001.jsonl").unlink()
    pipeline.run(judged(root), tmp_path / "run")
    for stage in ("revise", "compare"):
        assert rows(tmp_path / "run" / stage) == rows(other / stage) and len(rows(other / stage)) >= 32


@pytest.mark.slow
def test_the_weights_of_the_judge_are_gone_after_its_stage(root, tmp_path):
    """Live device bytes after compare are those before it, also with 4-bit weights."""
    made = judged(root, {"weights": "nf4"}, stages=("compare", "preference"), compare={"prompts": 16})

    def live():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    made, before = resolve_auto(made), live()
    (tmp_path / "compare").mkdir()
    load_stage("compare").run(StageContext(made, tmp_path, tmp_path / "compare", False))
    assert len(rows(tmp_path / "compare")) == 16
    weights = sum(leaf.size for leaf in jax.tree.leaves(_weights(root / "judge"))) * 4
    assert live() - before < 0.1 * weights


@pytest.mark.slow
def test_a_judge_on_a_mesh_gives_the_verdicts_of_one_device(root, other, tmp_path):
    """Up to rounding. Stage revise samples the answers and the critiques."""
    made = judged(root, stages=("revise",), mesh={"data": 2, "fsdp": 2})
    pipeline.run(made, tmp_path / "mesh")
    found, expected = rows(tmp_path / "mesh" / "revise"), rows(other / "revise")
    assert [row["critique"] for row in found] == [row["critique"] for row in expected]


@pytest.mark.slow
def test_a_model_rates_the_responses_of_ppo_and_labels_the_pairs_of_online_dpo(root, tmp_path):
    online = {"iterations": 1, "batch": 8, "minibatches": 2, "prompts": 16, "max_new_tokens": 8}
    made = judged(root, stages=("online_dpo", "ppo"), reward={"source": "ai_feedback"}, online_dpo=online)
    pipeline.run(made, tmp_path)
    metrics = [json.loads(line) for line in open(tmp_path / "ppo" / "metrics.jsonl")]
    assert all(-1 <= row["score"] <= 1 and row["kept"] == 8 for row in metrics)
    assert all(row["outside"] > 0 for row in rows(tmp_path / "online_dpo") if row["response_a"] != row["response_b"])


@pytest.mark.slow
def test_a_chat_model_judges_in_python(root):
    """`ja.Judge` reads with the chat template, without reasoning, and counts what is outside of the options."""
    judge = ja.Judge(ja.load_model(root / "judge"), ["Be brief."], max_outside_mass=1.0, undecided_margin=0.0, consistent=False,
                     max_new_tokens=8)
    found, = judge.compare([[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "why?"}]], ["so"], ["no"])
    assert found.reasoning_ab is None and found.label == pytest.approx((found.label_ab + found.label_ba) / 2)
    assert 0 < found.outside < 1 and 1 <= judge.rate(["why?"], ["so"])[0] <= 10
    revised, = judge.revise(["why?"], ["so"])
    assert revised.critique and revised.response == "so"


def _weights(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("judge", "feedback", "message"), [
    ({"path": ("nowhere",)}, {"judge": "model"}, "config.judge.path is nowhere, which is not a folder"),
    ({"path": ("{root}/scorer",)}, {"judge": "model"}, "scorer, a LlamaForSequenceClassification, which scores texts"),
    ({"max_length": 64}, {}, "reads at most 64 tokens, but a critique of the template set 'chat' takes .* judge.max_length"),
    ({"path": ("{root}/policy",), "max_length": 4096}, {"judge": "model"}, "config.judge.max_length is 4096, but the judge in"),
    ({"max_length": 4096}, {}, "config.judge.max_length is 4096, but the judge in .*policy has 1024 positions"),
    ({}, {"templates": "nowhere"}, "the template set nowhere does not exist"),
    ({"max_length": 512}, {"templates": "world"}, "lacks jaxalign's markers, which the template set 'world' needs"),
])
def test_a_judge_that_cannot_be_used_is_refused_before_the_run(root, tmp_path, judge, feedback, message):
    judge = {name: tuple(x.format(root=root) for x in value) if name == "path" else value for name, value in judge.items()}
    with pytest.raises(UserError, match=message) as error:
        pipeline.run(config(root, judge={"max_length": 0} | judge, feedback=feedback), tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run" / "revise").exists()
