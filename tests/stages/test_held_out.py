"""Splits hold out at least data.min_held_out dialogues, but at most a fifth to reach it."""

from __future__ import annotations

import json

import pytest

from jaxalign.config import Config, DataConfig, from_config_dict
from jaxalign.data.sources import files
from jaxalign.data.sources.base import SourceInputs, few_held_out, held_out_count, split_by_prompt
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Message, Prompt
from jaxalign.stages.shared import labelled, sources
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.labelled import comparison_row
from jaxalign.stages.shared.shards import Shards, prompt_row
from tests.feedback.fakes import WordTokenizer


def prompts(count):
    return [Prompt(f"x:{i}", (Message("user", f"question {i}"),), "file") for i in range(count)]


@pytest.mark.parametrize(("total", "share", "held"), [
    (50, 0.05, 8),  # 2 by the share
    (15, 0.05, 3),  # at most a fifth
    (15, 0.3, 4),  # the share gives more than a fifth
    (4, 0.05, 1),
    (50, 0.0, 0),
    (160, 0.05, 8),
    (400, 0.05, 20),
])
def test_a_split_holds_out_a_minimum_number_of_dialogues(total, share, held):
    train, held_out = split_by_prompt(prompts(total), share, 0, 8)
    assert (len(train), len(held_out)) == (total - held, held)


def test_a_split_that_reaches_the_minimum_by_its_share_does_not_depend_on_it():
    assert split_by_prompt(prompts(300), 0.05, 3, 8) == split_by_prompt(prompts(300), 0.05, 3)


def context(folder, total, **data):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(total)))
    config = from_config_dict({
        "stages": ("revise", "sft", "compare", "preference"), "model": {"source": "huggingface", "path": "x"},
        "data": {"source": "prompts_jsonl", "red_team": str(path), "style": "hh"} | data,
    })
    return StageContext(config, folder, folder / "preference", False)


def held_out_prompts(made):
    return len(sources.prompts(made, WordTokenizer(), "evaluate", 1000, 8))


def test_prompts_of_files_are_held_out_for_evaluation(tmp_path, capsys):
    assert held_out_prompts(context(tmp_path, 50)) == 8 and "held out" not in capsys.readouterr().out
    assert held_out_prompts(context(tmp_path, 50, min_held_out=0)) == 2
    assert held_out_prompts(context(tmp_path, 16)) == 3
    few = "3 dialogues are held out of 16: data.min_held_out is 8, but it raises the number to at most a fifth"
    assert f"[preference] {few}\n" in capsys.readouterr().out


def test_pairs_of_compare_are_held_out_for_the_preference_model(tmp_path, capsys):
    (tmp_path / "compare").mkdir()
    rows = [comparison_row(Comparison(prompt, "yes", "no", 0.9, decided=True)) for prompt in prompts(10)]
    Shards(tmp_path / "compare").write(0, rows)
    stage = context(tmp_path, 16)
    train, held_out, _ = labelled.labelled_split(stage, WordTokenizer(), stage.config.preference)
    assert (len(train), len(held_out)) == (8, 2)
    assert "[preference] 2 dialogues are held out of 10: data.min_held_out is 8" in capsys.readouterr().out


@pytest.mark.parametrize(("total", "expected"), [
    (400, list(range(0, 400, 20))),  # every 20th
    (40, list(range(0, 40, 5))),
    (12, [0, 6]),
])
def test_answers_of_revise_are_held_out_at_equal_distances(tmp_path, total, expected, capsys):
    (tmp_path / "revise").mkdir()
    rows = [prompt_row(prompt) | {"round": 0, "principle": None, "response": prompt.id, "critique": None, "revision": None,
                                  "complete": True, "outcome": None} for prompt in prompts(total)]
    Shards(tmp_path / "revise").write(0, rows)
    train, held_out, _ = labelled.answered(context(tmp_path, 16), None)
    assert [answer for _, answer in held_out] == [f"x:{i}" for i in expected]
    assert len(train) == total - len(expected) and not {a for _, a in train} & {a for _, a in held_out}
    assert ("[preference] 2 answers are held out of 12" in capsys.readouterr().out) == (total == 12)


def test_the_shares_of_the_default_run_give_more_than_the_minimum():
    config, least = Config(), DataConfig().min_held_out
    answers = config.revise.red_team_prompts * config.revise.rounds + config.revise.helpful_prompts
    assert config.preference.held_out_share * config.compare.prompts * 0.1 > least  # if only a tenth is decided
    assert answers * 0.1 / 20 > least


def test_the_only_held_out_dialogue_of_two_may_be_more_than_a_fifth():
    few = "1 dialogue is held out of 2: data.min_held_out is 8, but it raises the number to at most a fifth"
    assert few_held_out(2, held_out_count(2, 1, 8), 8) == few


def test_a_file_of_one_prompt_is_named_with_the_field(tmp_path):
    with pytest.raises(UserError, match=r"prompts\.jsonl: config\.data\.held_out_share is 0\.05, which leaves none of 1 "):
        held_out_prompts(context(tmp_path, 1))


def test_a_file_of_one_pair_is_named_with_the_field(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"prompt": "q", "chosen": "yes", "rejected": "no"}))
    config = from_config_dict({"stages": ("dpo",), "data": {"source": "preferences_jsonl", "train": str(path)}})
    with pytest.raises(UserError, match=r"one\.jsonl: config\.data\.held_out_share is 0\.05"):
        files.comparisons(SourceInputs(config))
