"""The files of config.data by purpose: splits without a common dialogue, mixtures, counts and missing files."""

from __future__ import annotations

import json

import pytest

from jaxalign.config import from_config_dict
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.data.sources.reports import rows_of_reason
from jaxalign.errors import UserError
from jaxalign.stages.shared import judges, reads, sources
from jaxalign.stages.shared.base import StageContext
from tests.feedback.fakes import WordTokenizer


def written(tmp_path, name, texts):
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


def context(tmp_path, stages=("ppo",), **data):
    config = from_config_dict({
        "stages": stages, "reward": {"source": "callable", "callable": "mine.py:score"}, "ppo": {"max_new_tokens": 8},
        "model": {"source": "huggingface", "path": "x", "max_length": 40},
        "data": {"source": "prompts_jsonl", "style": "hh"} | data,
    })
    return StageContext(config, tmp_path, tmp_path / stages[0], False)


def texts(context, purpose, count=1000):
    return [prompt.messages[-1].content for prompt in sources.prompts(context, WordTokenizer(), purpose, count, 8)]


@pytest.fixture
def files(tmp_path):
    return {"red_team": written(tmp_path, "bad", [f"bad {i}" for i in range(40)]),
            "helpful": written(tmp_path, "good", [f"good {i}" for i in range(20)])}


def test_a_share_of_the_dialogues_is_held_out_for_evaluation(tmp_path, files, capsys):
    made = context(tmp_path, held_out_share=0.2, **files)
    red, helpful, held = (texts(made, purpose) for purpose in ("red_team", "helpful", "evaluate"))
    assert len(held) == 12 and sorted(red + helpful + held) == sorted([*(f"bad {i}" for i in range(40)),
                                                                     *(f"good {i}" for i in range(20))])
    assert sorted(texts(made, "rl")) == sorted(red + helpful) == sorted(texts(made, "compare"))
    first = texts(made, "rl", 12)
    assert 7 <= sum(text.startswith("bad") for text in first) <= 9  # Two thirds of the prompts are from red_team.
    assert "bad.jsonl: 40 rows read, 40 prompts kept" in capsys.readouterr().out


def test_the_order_of_a_file_does_not_change_the_split(tmp_path, files):
    held = set(texts(context(tmp_path, held_out_share=0.2, **files), "evaluate"))
    files["red_team"] = written(tmp_path, "turned", [f"bad {i}" for i in reversed(range(40))])
    assert set(texts(context(tmp_path, held_out_share=0.2, **files), "evaluate")) == held


def test_evaluation_prompts_are_not_trained_on(tmp_path, files):
    own = written(tmp_path, "eval", ["bad 3", "new", "good 7"])
    made = context(tmp_path, eval=own, **files)
    assert texts(made, "evaluate") == ["bad 3", "new", "good 7"]
    trained = [text for purpose in ("red_team", "helpful", "rl") for text in texts(made, purpose)]
    assert not {"bad 3", "good 7"} & set(trained) and len(texts(made, "rl")) == 58
    sets = sources.prompt_sets(made, WordTokenizer())
    summary = sources.data_summary(sets)["data"]["files"]
    assert [(row["rows"], row["evaluated"]) for row in summary] == [(40, (4,)), (20, (8,)), (3, ())]


def test_a_file_of_which_every_prompt_is_evaluated_is_refused(tmp_path, files):
    with pytest.raises(UserError, match=r"all 40 prompts of .*bad.jsonl are used for evaluation"):
        texts(context(tmp_path, red_team=files["red_team"], eval=files["red_team"]), "red_team")


@pytest.mark.parametrize(("window", "read"), [(0, "10 rows read, 3 pairs kept"), (10, "10 of 10 rows read in 1 window, ")])
def test_rows_dropped_from_answered_files_are_counted_where_only_their_prompts_are_used(tmp_path, capsys, window, read):
    pairs = [{"prompt": f"why {i}", "chosen": "yes", "rejected": "yes" if i < 7 else "no"} for i in range(10)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = {"train": str(tmp_path / "pairs.jsonl"), "window": window, "min_held_out": 0}
    made = context(tmp_path, source="preferences_jsonl", **data)
    sets = sources.prompt_sets(made, WordTokenizer())
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"[ppo] {tmp_path / 'pairs.jsonl'}: {read}")
    assert shown[1] == "[ppo] 7 with two equal answers; dropped (lines 1, 2, 3, 4, 5, 6, 7)"
    assert shown[2] == f"[ppo] warning: only 3 of 10 rows of {tmp_path / 'pairs.jsonl'} can be used"
    (report,) = sources.data_summary(sets)["data"]["files"]
    assert (report["rows"], report["pairs"], rows_of_reason(report, "identical")) == (10, 3, 7)


def test_every_file_of_a_mixture_is_counted(tmp_path, capsys):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, count in zip(paths, (4, 6), strict=True):
        pairs = [{"prompt": f"{path.stem} {i}", "chosen": "yes", "rejected": "no"} for i in range(count)]
        path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    made = context(tmp_path, source="preferences_jsonl", train=str(paths[0]), extra_train=(str(paths[1]),))
    sets = sources.prompt_sets(made, WordTokenizer())
    files = sources.data_summary(sets)["data"]["files"]
    assert [(file["path"], file["pairs"]) for file in files] == [(str(paths[0]), 4), (str(paths[1]), 6)]
    assert capsys.readouterr().out.count("rows read") == 2


def test_own_rl_prompts_keep_their_columns(tmp_path, files):
    path = tmp_path / "rl.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"sum {i}", "answer": i}) + "\n" for i in range(5)))
    made = context(tmp_path, rl=str(path), **files)
    found = sources.prompts(made, WordTokenizer(), "rl", 10, 8)
    assert [prompt.columns["answer"] for prompt in found] == [0, 1, 2, 3, 4]


def test_helpful_prompts_are_optional(tmp_path, files):
    made = context(tmp_path, red_team=files["red_team"])
    assert texts(made, "helpful") == []
    with pytest.raises(UserError, match="config.data.source 'prompts_jsonl' has no red_team prompts"):
        texts(context(tmp_path, rl=files["helpful"]), "red_team")


def test_every_file_belongs_to_the_stage(tmp_path, files):
    made = context(tmp_path, eval=files["helpful"], red_team=files["red_team"])
    assert set(reads.data_files(made.config).values()) == {"data.red_team", "data.eval"}


@pytest.mark.parametrize(("stages", "data", "sentence"), [
    (("ppo",), {}, "config.data.red_team, helpful, rl and train are empty"),
    (("ppo",), {"eval": "e.jsonl"}, "config.data.red_team, helpful, rl and train are empty"),
    (("ppo",), {"rl": "a.jsonl", "train": "b.jsonl"}, "config.data.train and config.data.rl are both set"),
    (("revise",), {"rl": "a.jsonl"}, "stage revise needs prompts, but config.data.red_team is empty"),
    (("revise",), {"source": "preferences_jsonl", "train": "a.jsonl"}, "stage revise needs red-team prompts"),
    (("sft",), {"rl": "a.jsonl"}, "stage sft has no data to learn from"),
])
def test_missing_or_conflicting_files_are_refused(tmp_path, stages, data, sentence):
    with pytest.raises(UserError, match=sentence):
        context(tmp_path, stages, **data)


def test_stages_that_make_rows_feed_later_ones(tmp_path):
    """A run that revises and compares trains on the results; else on the rows of its file."""
    def made(**changes):
        base = {"model": {"source": "huggingface", "path": "x"}, "feedback": {"judge": f"{__file__}:Shorter"}}
        return from_config_dict(base | changes)

    own = made(stages=("revise", "sft", "compare", "preference"), data={
        "source": "prompts_jsonl", "red_team": "a.jsonl", "style": "hh"})
    assert sources.made_in(own, "revise") == ("revise",) and sources.made_in(own, "compare") == ("compare",)
    given = made(stages=("sft", "preference"), data={"source": "preferences_jsonl", "train": "a.jsonl", "style": "hh"})
    assert sources.made_in(given, "revise") == sources.made_in(given, "compare") == ()


class Shorter:
    """A judge that prefers the shorter answer, and shortens answers."""

    def critique(self, requests, draw):
        return ["too long"] * len(requests)

    def revise(self, requests, draw):
        return [request.response[:10] for request in requests]

    def compare(self, requests, draw):
        return [0.9 if len(request.first) < len(request.second) else 0.1 for request in requests]


class Rater:
    """A judge that only rates."""

    def rate(self, requests, draw):
        return [5.0] * len(requests)


OWN = {"model": {"source": "huggingface", "path": "x"}, "feedback": {"judge": f"{__file__}:Shorter"},
       "data": {"source": "prompts_jsonl", "red_team": "a.jsonl", "style": "chat"}}
RATED = OWN | {"feedback": {"judge": f"{__file__}:Rater"}, "reward": {"source": "ai_feedback"}}
SUMS = {"source": "arithmetic"}
ANSWERS = {"reward": {"source": "preference+verifier"}}


@pytest.mark.parametrize("changes", [
    {"stages": ("revise", "sft", "compare", "dpo", "evaluate")},
    {"stages": ("online_dpo",)},
    {"stages": ("compare", "preference", "best_of_n")},
    {"stages": ("revise", "sft"), "model": {}, "data": SUMS, "error": "stage revise needs red-team prompts"},
    {"stages": ("pretrain", "compare"), "model": {}, "data": SUMS},
    {"stages": ("pretrain", "compare"), "model": {}, "data": SUMS, "feedback": {},
     "error": "trains a base model that cannot judge"},
    {"stages": ("sft", "compare", "preference"), "error": "stage sft has no data to learn from .* add revise to config.stages"},
    {"stages": ("preference",), "error": "stage preference has no data to learn from .* add compare to config.stages"},
    {"stages": ("ppo",), "error": "add compare and preference to config.stages"},
    {"stages": ("dpo",), "error": "stage dpo has no data to learn from"},
    RATED | {"stages": ("ppo", "evaluate")},
    RATED | {"stages": ("compare",), "error": "has no method 'compare'; stage compare needs it"},
    ANSWERS | {"stages": ("compare", "preference", "ppo"), "error": "config.data.rl is empty"},
    ANSWERS | {"stages": ("compare", "preference", "ppo", "evaluate"), "data": OWN["data"] | {"rl": "b.jsonl"},
               "error": "set config.data.eval to a file that has them"},
    ANSWERS | {"stages": ("compare", "preference", "ppo", "evaluate"),
               "data": OWN["data"] | {"rl": "b.jsonl", "eval": "c.jsonl"}},
    {"stages": ("compare", "preference"), "preference": {"margin_weight": 1.0},
     "data": {"source": "preferences_jsonl", "train": "a.jsonl", "style": "hh"},
     "error": "pairs of stage compare have no margins"},
], ids=lambda changes: f"{'+'.join(changes['stages'])}-{'refused' if 'error' in changes else 'accepted'}")
def test_stages_are_accepted_if_the_run_has_their_data_and_their_judge(changes):
    error = changes.get("error")
    values = OWN | {name: value for name, value in changes.items() if name != "error"}
    if error is None:
        assert from_config_dict(values).stages == changes["stages"]
        return
    with pytest.raises(UserError, match=error):
        from_config_dict(values)


def test_a_judge_that_cannot_compare_gives_no_win_rates():
    assert not judges.compares(from_config_dict(RATED | {"stages": ("ppo", "evaluate")}))
    assert judges.compares(from_config_dict(OWN | {"stages": ("online_dpo", "evaluate")}))
    assert judges.compares(resolve_auto(from_config_dict({})))


def test_a_dialogue_of_two_files_is_used_once(tmp_path, files):
    files["helpful"] = written(tmp_path, "mixed", ["bad 3", "good 1", "bad 4"])
    made = context(tmp_path, held_out_share=0.0, **files)
    assert texts(made, "helpful") == ["good 1"] and len(texts(made, "red_team")) == 40 and len(texts(made, "rl")) == 41
    summary = sources.data_summary(sources.prompt_sets(made, WordTokenizer()))["data"]["files"]
    assert summary[1]["in_red_team"] == (1, 3)


def test_a_prompt_that_the_style_cannot_write_is_named_with_the_reason(tmp_path, capsys):
    path = tmp_path / "system.jsonl"
    rule = {"role": "system", "content": "Be brief."}
    ask = {"role": "user", "content": "Why?"}
    rows = ([1], {"messages": [rule, ask]}, {"messages": [ask]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"style": "compact", "rl": str(path), "max_bad_share": 0.5, "held_out_share": 0.0}
    assert texts(context(tmp_path, **changes), "rl") == ["Why?"]
    assert "1 of 2 rl prompts were left out, since the style 'compact' rejects them (system:2)" in capsys.readouterr().out
    path.write_text(json.dumps({"messages": [rule, ask]}) + "\n")
    with pytest.raises(UserError, match=r"the style 'compact' rejects 1 of the 1 rl prompts .*has a system message"):
        texts(context(tmp_path, **changes), "rl")


def test_no_evaluation_prompts_is_its_own_error(tmp_path, files):
    with pytest.raises(UserError, match=r"has no evaluate prompts; give more prompts, set config.data.eval, or raise"):
        texts(context(tmp_path, held_out_share=0.0, **files), "evaluate")
