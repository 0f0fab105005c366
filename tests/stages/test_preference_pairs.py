"""The pairs of stage preference: human files next to the pairs of stage compare, and the halves for early stopping."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Message, Prompt
from jaxalign.stages.preference import PreferenceStage
from jaxalign.stages.shared import preview
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.labelled import comparison_row, read_comparisons
from jaxalign.stages.shared.preference_pairs import is_human, preference_pairs
from jaxalign.stages.shared.shards import Shards
from jaxalign.trainers.answers import pair_arrays as answer_arrays
from jaxalign.trainers.scoring import pair_arrays
from tests.feedback.fakes import WordTokenizer


def comparisons(numbers, **fields):
    prompts = [Prompt(f"x:{i}", (Message("user", f"question {i}"),), "rl") for i in numbers]
    return [Comparison(prompt, "yes", "no", 0.9, **fields) for prompt in prompts]


def context(folder, human=(), weight=1.0, **preference):
    """40 pairs of stage compare, and a file of human pairs for the questions `human`."""
    (folder / "compare").mkdir()
    Shards(folder / "compare").write(0, [comparison_row(pair) for pair in comparisons(range(40))])
    path = folder / "human.jsonl"
    rows = [{"prompt": f"question {i}", "chosen": "certainly", "rejected": "maybe not"} for i in human]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if human:
        preference |= {"human": (str(path),), "human_weight": weight}
    return StageContext(from_config_dict({"preference": preference, "data": {"style": "compact"}}), folder,
                        folder / "preference", False)


def questions(pairs):
    return {pair.prompt.messages for pair in pairs}


def test_human_pairs_follow_those_of_compare_and_share_no_held_out_dialogue(tmp_path):
    made = context(tmp_path, human=range(20, 60), weight=0.25)
    pairs = preference_pairs(made, WordTokenizer())
    assert len(pairs.train) + len(pairs.held_out) == 80 and not pairs.choosing
    assert not questions(pairs.train) & questions(pairs.held_out)
    for part in (pairs.train, pairs.held_out):
        kinds = [is_human(pair) for pair in part]
        assert kinds == sorted(kinds) and {False, True} == set(kinds)
        assert {pair.weight for pair in part if is_human(pair)} == {0.25}
        assert {pair.weight for pair in part if not is_human(pair)} == {1.0}
    assert [report.pairs for report in pairs.human] == [40]
    assert PreferenceStage().files(made.config)[tmp_path / "human.jsonl"] == "preference.human"
    arrays = pair_arrays(WordTokenizer(), pairs.train, "compact", 64)
    assert arrays.weight.tolist() == [pair.weight for pair in pairs.train]


def test_a_repeated_pair_counts_once_among_the_held_out_ones(tmp_path, capsys):
    pairs = preference_pairs(context(tmp_path, human=[*range(60), *range(60)], held_out_share=0.2), WordTokenizer())
    human = [pair.prompt.messages for pair in pairs.held_out if is_human(pair)]
    assert len(human) == len(set(human)) >= 12
    assert sum(map(is_human, pairs.train)) == 120 - 2 * len(human)
    said = f"[preference] {len(human)} of {len(pairs.held_out) + len(human)} held-out pairs repeat others and are counted once"
    assert said in capsys.readouterr().out


def test_early_stopping_chooses_on_one_half_of_the_held_out_dialogues(tmp_path, capsys):
    pairs = preference_pairs(context(tmp_path, early_stopping=True, held_out_share=0.25), WordTokenizer())
    assert (len(pairs.choosing), len(pairs.held_out)) == (5, 5)
    assert not questions(pairs.choosing) & questions(pairs.held_out)
    said = "5 of the 10 held-out dialogues choose the weights, and the other 5 measure the accuracy"
    assert f"[preference] {said}, fewer than data.min_held_out (8)" in capsys.readouterr().out


def test_all_lines_of_a_later_round_name_it(tmp_path, capsys):
    made = context(tmp_path, human=[*range(60), *range(60)], early_stopping=True, held_out_share=0.2)
    preference_pairs(dataclasses.replace(made, round=2), WordTokenizer())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2 and all(line.startswith("[preference, round 2] ") for line in lines)


def test_without_the_options_the_split_is_that_of_compare(tmp_path):
    pairs = preference_pairs(context(tmp_path, held_out_share=0.2), WordTokenizer())
    assert (len(pairs.train), len(pairs.choosing), len(pairs.held_out), pairs.human) == (32, 0, 8, ())


def test_the_weight_of_a_pair_of_compare_reaches_both_kinds_of_arrays(tmp_path):
    shards = Shards(tmp_path)
    shards.write(0, [comparison_row(pair) for pair in (*comparisons([0], weight=0.5), *comparisons([1]))])
    assert ["weight" in row for row in shards.read()] == [True, False]
    pairs = read_comparisons(shards, "drop")
    assert pair_arrays(WordTokenizer(), pairs, "compact", 64).weight.tolist() == [0.5, 1.0]
    config = from_config_dict({})
    assert answer_arrays(WordTokenizer(), pairs, "compact", config.dpo).weight.tolist() == [0.5, 1.0]
    assert answer_arrays(WordTokenizer(), pairs, "compact", config.dpo, single=True).weight.tolist() == [0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(("fields", "message"), [
    ({"preference": {"human": ("a.jsonl",)}, "stages": ("sft", "preference"),
      "model": {"source": "huggingface", "path": "x"}, "data": {"source": "preferences_jsonl", "train": "b.jsonl"}},
     "list the files in config.data.extra_train instead"),
    ({"preference": {"human_weight": 0.5}}, "config.preference.human_weight is 0.5, which has no effect"),
    ({"preference": {"patience": 5}}, "config.preference.patience is 5, which has no effect"),
    ({"preference": {"early_stopping": True, "held_out_share": 0.0}}, "so no pair measures the loss"),
])
def test_options_without_effect_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        from_config_dict(fields)


def test_the_preview_reads_the_human_files(tmp_path, monkeypatch):
    """So `--dry-run`, which previews one row, reports their broken rows."""
    monkeypatch.setattr(preview, "_require", lambda *arguments: None)
    made = context(tmp_path, human=range(40, 60))
    assert len(preview.preference_rows(made, WordTokenizer(), 1)) == 2
    with open(tmp_path / "human.jsonl", "a") as file:
        file.write('{"prompt": "a", "chosen": null, "rejected": "b"}\n')
    with pytest.raises(UserError, match="1 of 21 lines of .* are broken"):
        preview.preference_rows(made, WordTokenizer(), 1)
