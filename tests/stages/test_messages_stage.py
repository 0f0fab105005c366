"""Stage sft on a file of answered dialogues with system messages, and the refusal of dialogues without a place for them."""

from __future__ import annotations

import json

import pytest

import jaxalign as ja
from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.tracking.metrics import read_metrics
from tests import made_tokenizers
from tests.folders import write_model
from tests.small_run import read
from tests.tracking.pages import check_links

RULE = {"role": "system", "content": "Be brief."}
LOOP = "{%- for message in messages"
NO_SYSTEM = made_tokenizers.CHATML.replace(LOOP, f"{LOOP} if message.role != 'system'")


def dialogue(number: int, system: bool = True) -> list[dict[str, str]]:
    said = (("user", f"Hi {number}."), ("assistant", "Hi."), ("user", "Why?"), ("assistant", f"Since {number}."))
    return [RULE] * system + [{"role": role, "content": text} for role, text in said]


def values(model, path):
    return {
        "stages": ("sft", "evaluate", "report"), "compile_cache": None,
        "model": {"source": "huggingface", "path": str(model), "max_length": 128},
        "data": {"source": "messages_jsonl", "train": str(path), "held_out_share": 0.0},
        "sft": {"batch_rows": 2, "row_length": 128}, "evaluate": {"batch": 8, "max_new_tokens": 8, "prompts": 4},
    }


def write(path, rows):
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_stage_sft_trains_on_messages_as_the_trainer_does(tmp_path):
    model = write_model(tmp_path / "model")
    rows = [dialogue(number, number % 2 == 0) for number in range(12)]
    config = values(model, write(tmp_path / "chat.jsonl", [*rows, [RULE]]))
    config["data"] |= {"max_bad_share": 0.1, "held_out_share": 0.2}
    pipeline.run(from_config_dict(config), tmp_path / "run")
    summary = read(tmp_path / "run" / "sft" / "summary.json")
    assert summary["data"]["answers"] == 12 and [place["line"] for place in summary["data"]["broken"]] == [13]
    assert summary["answers"] == 10 and summary["cut"] == 0
    assert read(tmp_path / "run" / "summary.json")["models"] == ["base", "sft"]
    shards = (tmp_path / "run" / "evaluate").glob("rows-*.jsonl")
    prompts = [json.loads(line)["messages"] for shard in shards for line in shard.read_text().splitlines()]
    held_out = [row for row in rows if row[:-1] in prompts]
    assert len(held_out) == 2
    trainer = ja.SFT(ja.load_model(model, max_length=128), batch_rows=2, row_length=128)
    losses = [step.metrics["loss"] for step in trainer.fit([{"messages": row} for row in rows if row not in held_out])]
    assert losses == [row["loss"] for row in read_metrics(tmp_path / "run" / "sft" / "metrics.jsonl")]
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "losses" in check_links(tmp_path / "run" / "report.html")
    assert "Fine-tuning imitated the answers of the data." in report and "chat.jsonl (answered dialogues)" in report


@pytest.mark.medium
def test_a_system_message_without_a_place_in_the_template_is_refused_by_the_number_of_its_row(tmp_path, capsys):
    model = write_model(tmp_path / "model", template=NO_SYSTEM)
    policy = ja.load_model(model)
    path = write(tmp_path / "chat.jsonl", [dialogue(number, number == 3) for number in range(8)])
    config = values(model, path) | {"stages": ("sft",)}
    pipeline.run(from_config_dict(config), tmp_path / "run")
    assert read(tmp_path / "run" / "sft" / "summary.json")["data"]["refused"] == [4]
    assert "1 rejected by the chat template or the style; dropped (lines 4)" in capsys.readouterr().out
    rows = [{"prompt": dialogue(number, number == 2)[:-1], "chosen": "Good.", "rejected": "Bad."} for number in range(3)]
    answers = [{"prompt": row["prompt"], "completion": "Good.", "label": True} for row in rows]
    for place, call in (
        (r"SFT.fit\(rows\)\[2\]", lambda: ja.SFT(policy).fit([{"messages": dialogue(n, n == 2)} for n in range(3)])),
        ("pair-2", lambda: ja.DPO(policy).fit(rows)),
        ("answer-2", lambda: ja.DPO(policy, objective="kto").fit(answers)),
        ("pair-2", lambda: ja.RewardModel(policy).fit(rows)),
        ("prompt-2", lambda: ja.PPO(policy, len, batch=4, minibatches=1).fit([row["prompt"] for row in rows])),
        (r"prompts\[2\]", lambda: ja.Sampler(policy, batch=4).generate([row["prompt"] for row in rows], 4)),
    ):
        with pytest.raises(UserError, match=f"{place}: the chat template of .* leaves the system message out"):
            list(call())


def test_stages_that_learn_from_pairs_refuse_a_file_of_messages(tmp_path):
    with pytest.raises(UserError, match="stage dpo has no data to learn from with config.data.source 'messages_jsonl'"):
        from_config_dict({"stages": ("dpo",), "model": {"source": "huggingface", "path": "x"},
                          "data": {"source": "messages_jsonl", "train": "a.jsonl"}})
