"""How many rows of stage revise can be trained on: too few stop stage sft, and only the text to imitate must be whole."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.stages.revise import _warn_early
from jaxalign.stages.sft import SftStage
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.labelled import labelled_pairs, revision_split
from tests.folders import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("usable") / "model")


def revision(number, outcome=None, **changes):
    """A row of stage revise; with an outcome, its revision is not an ordinary one."""
    row = {"prompt_id": f"p{number}", "messages": [{"role": "user", "content": f"Why {number}?"}], "source": "red_team",
           "round": 1, "principle": "kind", "response": "Go away!", "critique": "It is rude.", "revision": f"It is {number}.",
           "complete": outcome is None}
    return row | ({} if outcome is None else {"outcome": outcome}) | changes


def context(model, folder, rows, **sft):
    config = from_config_dict({
        "stages": ("revise", "sft"), "compile_cache": None,
        "model": {"source": "huggingface", "path": str(model), "max_length": 64},
        "data": {"source": "prompts_jsonl", "red_team": "red.jsonl", "style": "chat"},
        "feedback": {"reasoning": False}, "sft": {"batch_rows": 2, "row_length": 64} | sft,
    })
    for stage in ("revise", "sft"):
        (folder / stage).mkdir()
    (folder / "revise" / "rows-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return StageContext(config, folder, folder / "sft", False)


def test_pitfall_29_two_usable_revisions_of_78_stop_sft(model, tmp_path):
    """Another system fine-tuned on the 2 of 78 revisions that counted as complete, and ended with exit code 0."""
    rows = [revision(i, None if i < 2 else "cut_off" if i < 70 else "refused") for i in range(78)]
    with pytest.raises(UserError) as error:
        SftStage().run(context(model, tmp_path, rows))
    assert str(error.value) == (
        "sft.required_rows is 8, but 2 of 78 answers and revisions can be trained on; left out: 68 cut_off (the text reached "
        "the length limit), 8 refused (the judge declined to answer); raise revise.max_new_tokens, start from a model that "
        "ends its answers, or set sft.keep to ('unchanged', 'cut_off')")
    assert not any((tmp_path / "sft").iterdir())


def test_a_small_share_of_usable_revisions_stops_sft(model, tmp_path):
    """29 of 3,584 revisions were complete, which is more than sft.required_rows."""
    rows = [revision(i, None if i < 29 else "cut_off") for i in range(3584)]
    made = context(model, tmp_path, rows)
    message = (r"config.sft.required_share is 0.05, but only 29 of 3,584 rows \(0.8%\) can be used: 29 of 3,584 answers and "
               "revisions can be trained on; left out: 3,555 cut_off .* raise revise.max_new_tokens")
    with pytest.raises(UserError, match=message):
        SftStage().run(made)
    assert not any((tmp_path / "sft").iterdir())
    accepting = dataclasses.replace(made.config.sft, required_share=0.005)
    accepted = dataclasses.replace(made, config=dataclasses.replace(made.config, sft=accepting))
    assert revision_split(accepted)[2].usable == 29


def test_revise_warns_after_its_first_rows_if_sft_would_refuse_them(model, tmp_path, capsys):
    config = context(model, tmp_path, []).config
    _warn_early(config, [revision(i, None if i < 5 else "cut_off") for i in range(100)])
    assert not capsys.readouterr().out
    _warn_early(config, [revision(i, None if i < 4 else "cut_off") for i in range(100)])
    assert capsys.readouterr().out.startswith("[revise] warning: config.sft.required_share is 0.05, but only 4 of 100 rows "
                                              "(4.0%) can be used so far: 4 of 100 answers and revisions can be trained on; ")


def test_a_small_share_of_usable_pairs_stops_the_training_on_them(model, tmp_path):
    labels = {"principles": ["kind"], "label": 0.9, "label_ab": 0.9, "label_ba": 0.1, "reasoning_ab": None,
              "reasoning_ba": None}
    rows = [{"prompt_id": f"p{i}", "messages": [{"role": "user", "content": f"Why {i}?"}], "source": "red_team",
             "response_a": "Yes.", "response_b": "No.", "decided": i < 4} | labels
            | ({} if i < 4 else {"outcome": "unreadable"}) for i in range(100)]
    made = context(model, tmp_path, [])
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare" / "rows-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = (r"config.feedback.required_share is 0.05, but only 4 of 100 rows \(4.0%\) can be used: 4 of 100 pairs of stage "
               "compare can be trained on; left out: 96 unreadable")
    with pytest.raises(UserError, match=message):
        labelled_pairs(made)
    accepting = dataclasses.replace(made.config.feedback, required_share=0.04)
    assert len(labelled_pairs(dataclasses.replace(made, config=dataclasses.replace(made.config, feedback=accepting)))) == 4


@pytest.mark.medium
def test_pitfall_29_the_number_of_usable_rows_is_printed_and_few_are_warned_about(model, tmp_path, capsys):
    SftStage().run(context(model, tmp_path, [revision(i, None if i < 12 else "grown") for i in range(40)], min_rows=10))
    out = capsys.readouterr().out
    assert "[sft] 12 of 40 answers and revisions can be trained on; left out: 28 grown (" in out
    assert "[sft] warning: only 30% of the rows can be trained on, less than sft.min_share (50%)" in out
    summary = json.loads((tmp_path / "sft" / "summary.json").read_text())
    assert summary["answers"] == 10  # A fifth is held out.
    assert summary["data"] == {"total": 40, "usable": 12, "reasons": {"grown": 28}, "kept": {}, "share": 0.3}


def test_pitfall_29_whole_revisions_of_cut_answers_are_all_trained_on(model, tmp_path, capsys):
    """The first answers of a base model often reach the length limit. A row counts by its revision, which is the text to
    imitate; helpful answers, which are imitated themselves, must be whole."""
    cut = [revision(i, response="Go away and", notes=["next_turn"]) for i in range(30)]
    missing = {"round": 0, "critique": None, "revision": None, "principle": None}
    helpful = [revision(30, "cut_off", **missing), revision(31, **missing)]
    SftStage().run(context(model, tmp_path, [*cut, *helpful], min_rows=1))
    summary = json.loads((tmp_path / "sft" / "summary.json").read_text())
    assert summary["data"] == {"total": 32, "usable": 31, "reasons": {"cut_off": 1}, "kept": {}, "share": 31 / 32}
    assert summary["answers"] == 31 - 6
    assert "warning: only" not in capsys.readouterr().out
