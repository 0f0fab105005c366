"""Several preference files: the names of sources, the counts, the weights, and the order of prompts."""

from __future__ import annotations

import collections
import json

import pytest

from jaxalign.config import from_config_dict
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.errors import UserError
from jaxalign.stages.shared import labelled, reads, sources
from jaxalign.stages.shared.base import StageContext
from tests.feedback.fakes import WordTokenizer


def write(path, name, count):
    path.parent.mkdir(exist_ok=True)
    rows = [{"prompt": f"{name} {i}", "chosen": "a b", "rejected": "c"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path):
    """Eight helpful and four harmless pairs, in two files of the same name, as in HH-RLHF."""
    return write(tmp_path / "helpful" / "train.jsonl", "help", 8), write(tmp_path / "harmless" / "train.jsonl", "harm", 4)


def context(tmp_path, train, *extra, **data):
    values = {"source": "preferences_jsonl", "train": train, "extra_train": extra, "held_out_share": 0.25} | data
    config = from_config_dict({"stages": ("sft", "preference", "ppo"), "data": values})
    return StageContext(resolve_auto(config), tmp_path, tmp_path / "preference", False)


def test_the_source_of_a_pair_names_its_file(tmp_path, files):
    train, held_out, report = sources.source_rows(context(tmp_path, *files), WordTokenizer(), "comparisons")
    pairs = [pair.prompt for pair in train + held_out]
    assert collections.Counter(prompt.source for prompt in pairs) == {"helpful/train": 8, "harmless/train": 4}
    assert len({prompt.id for prompt in pairs}) == 12 and pairs[0].id.startswith("helpful/train:")
    assert [file["pairs"] for file in report.to_dict()["files"]] == [8, 4] and len(report.sentences()) == 2
    assert {str(path) for path in reads.data_files(context(tmp_path, *files).config)} == set(files)


def test_pairs_of_a_single_file_have_the_source_human(tmp_path, files):
    train, _, report = sources.source_rows(context(tmp_path, files[0]), WordTokenizer(), "comparisons")
    assert {pair.prompt.source for pair in train} == {"human"} and report.to_dict()["pairs"] == 8
    assert train[0].prompt.id.startswith("train:")


def test_weights_are_shares_of_the_training_pairs_of_an_epoch(tmp_path, files):
    """An epoch of 9 training pairs takes two thirds from the second file, which has only about 3."""
    here = context(tmp_path, *files, weights=(1.0, 2.0))
    train, _, _ = sources.source_rows(here, WordTokenizer(), "comparisons")
    assert len(train) == 9
    loader = labelled.pair_loader(here, train, 9, 100)
    drawn = collections.Counter(train[i].prompt.source for i in loader.indices(0))
    assert drawn == {"helpful/train": 3, "harmless/train": 6}
    twice = labelled.pair_loader(here, train, 18, 300, rows_per_pair=2)
    drawn = collections.Counter(train[i // 2].prompt.source for i in twice.indices(0))
    assert drawn == {"helpful/train": 6, "harmless/train": 12}
    plain = labelled.pair_loader(context(tmp_path, *files), train, 9, 100)
    assert sorted(plain.indices(0)) == list(range(9))


def test_prompts_of_rl_come_from_all_files(tmp_path, files):
    def found(count, **data):
        prompts = sources.prompts(context(tmp_path, *files, held_out_share=0.0, **data), WordTokenizer(), "rl", count, 8)
        return collections.Counter(prompt.source for prompt in prompts)

    assert found(6) == {"helpful/train": 4, "harmless/train": 2}
    assert found(6, weights=(1.0, 1.0)) == {"helpful/train": 3, "harmless/train": 3}
    assert found(12, weights=(1.0, 5.0)) == {"helpful/train": 8, "harmless/train": 4}


def test_a_file_given_twice_is_reported_in_one_sentence(tmp_path, files):
    with pytest.raises(UserError, match="name the same file twice"):
        sources.source_rows(context(tmp_path, files[0], files[0]), WordTokenizer(), "comparisons")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"extra_train": ("b.jsonl",)}, "config.data.extra_train is .*, which has no effect when .*source is 'world'"),
        ({"source": "preferences_jsonl", "train": "a", "weights": (1.0, 1.0)}, "weights has 2 numbers for 1 files"),
        ({"source": "preferences_jsonl", "train": "a", "extra_train": ("b",), "weights": (1.0, 0.0)},
         "every weight must be above 0"),
    ],
)
def test_invalid_files_and_weights_are_refused(data, message):
    with pytest.raises(UserError, match=message):
        from_config_dict({"data": data})
