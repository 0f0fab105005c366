"""A user's data source in `config.data.source`: prompts for RL, pairs for sft, and invalid rows."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import DATA_SOURCES, DataSourceRecord
from jaxalign.stages.shared import reads, sources
from jaxalign.stages.shared.base import StageContext
from tests.feedback.fakes import WordTokenizer

PLUGIN = pathlib.Path(__file__).parent / "plugins" / "data_source.py"


def context(tmp_path, source, stages=("ppo",), **changes):
    values = {"stages": stages, "model": {"source": "huggingface", "path": "x", "max_length": 64}, "ppo": {"max_new_tokens": 8},
              "data": {"source": source, "style": "hh"}, "reward": {"source": "verifier"}}
    return StageContext(from_config_dict(values | changes), tmp_path, tmp_path / stages[0], False)


def test_ppo_and_evaluation_use_its_prompts(tmp_path):
    here = context(tmp_path, f"{PLUGIN}:SUMS")
    train = sources.prompts(here, WordTokenizer(), "rl", 12, 8)
    held_out = sources.prompts(here, WordTokenizer(), "evaluate", 99, 8)
    assert [prompt.id for prompt in train[:3]] == ["sum-0-0", "sum-0-1", "sum-0-2"] and len(train) == 12
    assert [prompt.columns["answer"] for prompt in held_out] == list(range(9, 19))
    assert reads.data_files(here.config) == {PLUGIN: "data.source"}


@pytest.mark.slow
def test_sft_trains_on_its_better_answers(tmp_path):
    """This runs in the pipeline, on a base pretrained on text of the embedded world."""
    config = from_config_dict({
        "stages": ("pretrain", "sft"),
        "data": {"source": f"{PLUGIN}:LARGER", "held_out_share": 0.25},
        "world": {"tokens": 10_000, "topics": 12, "held_out_topics": 4, "vocab_size": 400},
        "model": {"layers": 1, "embed": 16, "mlp": 24, "heads": 2, "kv_heads": 1, "head_dim": 8, "max_length": 64},
        "pretrain": {"steps": 2, "batch_rows": 2, "row_length": 64},
        "sft": {"batch_rows": 2, "row_length": 64},
    })
    pipeline.run(config, tmp_path)
    summary = json.loads((tmp_path / "sft" / "summary.json").read_text())
    assert summary["answers"] == 15 and summary["held_out_loss"] > 0


def test_a_registered_source_is_found_by_name(tmp_path):
    record = DataSourceRecord("letters", prompts=lambda inputs: ["no prompt"])
    DATA_SOURCES.register(record)
    try:
        assert DATA_SOURCES.get("letters", "config.data.source") is record
        with pytest.raises(UserError, match="already registered"):
            DATA_SOURCES.register(DataSourceRecord("world"))
    finally:
        DATA_SOURCES.unregister("letters")


@pytest.mark.parametrize(("kind", "rows", "message"), [
    ("prompts", "3", "gives prompts of type int; an object with a length and an index from 0"),
    ("prompts", "[]", "has no prompts to learn from"),
    ("prompts", "['why?']", "row 0 of its prompts is of type str; a jaxalign.records.Prompt is expected"),
    ("prompts", "[P('a', (M('user', 'x'),), 's'), P('a', (M('user', 'y'),), 's')]", "row 1 .* id 'a' of an earlier row"),
    ("prompts", "[P('a', (M('user', ' '),), 's')]", "row 0 .* does not end with a non-empty user message"),
    ("prompts", "[P('a', (M('assistant', 'x'),), 's')]", "row 0 .* does not end with a non-empty user message"),
    ("prompts", "[][1]", r"building its prompts raised IndexError at .*own\.py:8: "),
    ("prompts", "Broken()", r"reading row 0 of its 2 prompts raised KeyError at .*own\.py:7: "),
    ("comparisons", "[C(Q, 'a', 'b', NAN)]", "row 0 .* label nan; the probability in"),
    ("comparisons", "[C(Q, 'a', 'b', 1.5)]", "row 0 .* label 1.5"),
    ("comparisons", "[C(Q, 'a', 'b', 1.0, margin=NAN)]", "row 0 .* margin nan; None or a finite number"),
    ("comparisons", "[C(Q, 'a', '', 1.0)]", "row 0 .* response_b ''; non-empty text is expected"),
    ("comparisons", "[C(Q, 'a', None, 1.0)]", "row 0 .* response_b 'None'; a string is expected"),
    ("judgements", "[J(Q, 'a', 1)]", "row 0 .* desirable=1; True or False"),
    ("judgements", "[J(Q, 'a', True)] * 2", "leaves none of 1 distinct dialogue to train on; set it to 0"),
])
def test_invalid_rows_are_reported_in_one_sentence(tmp_path, kind, rows, message):
    path = tmp_path / "own.py"
    path.write_text(f"""
from jaxalign.records import Comparison as C, Judgement as J, Message as M, Prompt as P
from jaxalign.registry.data_sources import DataSourceRecord
NAN, Q = float("nan"), P("q", (M("user", "why?"),), "s")
class Broken:
    def __len__(self): return 2
    def __getitem__(self, index): return {{}}["row"]
SOURCE = DataSourceRecord("own", {kind}=lambda inputs: {rows}, answers=True)
""")
    stages = {"prompts": ("ppo",), "comparisons": ("sft",), "judgements": ("dpo",)}[kind]
    here = context(tmp_path, f"{path}:SOURCE", stages, dpo={"objective": "kto", "max_length": 64})
    read = {
        "prompts": lambda: sources.prompts(here, WordTokenizer(), "rl", 9, 8),
        "comparisons": lambda: sources.source_rows(here, WordTokenizer(), "comparisons"),
        "judgements": lambda: sources.source_rows(here, WordTokenizer(), "judgements"),
    }[kind]
    with pytest.raises(UserError, match=message) as raised:
        read()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("changes", "message"), [
    ({"source": "worlds"}, "config.data.source is 'worlds'; one of world, preferences_jsonl"),
    ({"source": "no.such.module:SOURCE"}, "no.such.module cannot be imported"),
    ({"source": f"{PLUGIN}:Sums"}, "is of type type; a jaxalign DataSourceRecord is expected"),
    ({"source": "arithmetic", "limit": 3}, "config.data.limit is 3, which has no effect when config.data.source"),
])
def test_an_invalid_source_is_refused_before_the_run(changes, message):
    with pytest.raises(UserError, match=message):
        from_config_dict({"stages": ("ppo",), "data": changes, "reward": {"source": "verifier"}})


def test_a_stage_that_a_source_cannot_feed_is_refused(tmp_path):
    with pytest.raises(UserError, match="stage sft has no data to learn from with config.data.source 'sums'; .* ppo, evaluate"):
        context(tmp_path, f"{PLUGIN}:SUMS", ("sft", "ppo"))
    with pytest.raises(UserError, match="has no text to train a tokenizer and a base model on"):
        from_config_dict({"stages": ("ppo",), "data": {"source": f"{PLUGIN}:SUMS"}, "reward": {"source": "verifier"}})
