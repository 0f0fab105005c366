"""data.style=plain in a whole run: a base model continues single texts, in supervised training, DPO and PPO."""

from __future__ import annotations

import json

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.labelled import answered
from jaxalign.trainers.sft import packed
from tests.compilations import SEEN
from tests.folders import write_model

SIZES = {"batch": 8, "max_new_tokens": 8}
REWARD = "def score(prompts, responses, **columns):\n    return [float('a' in text) for text in responses]\n"


@pytest.mark.slow
def test_a_base_model_is_trained_on_plain_texts_by_sft_dpo_and_ppo(tmp_path, capsys):
    model = write_model(tmp_path / "model", template=None)
    rows = [{"prompt": f"The cat number {i} sat", "chosen": f" on mat {i}.", "rejected": f" nowhere {i}."} for i in range(24)]
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    rows.append({side: [*turns, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(REWARD)
    config = from_config_dict({
        "stages": ("sft", "dpo", "ppo", "evaluate", "report"), "compile_cache": None,
        "model": {"source": "huggingface", "path": str(model), "max_length": 64},
        "data": {"source": "preferences_jsonl", "train": str(tmp_path / "pairs.jsonl"), "style": "plain",
                 "held_out_share": 0.2},
        "reward": {"source": "callable", "callable": f"{tmp_path / 'mine.py'}:score"},
        "sft": {"batch_rows": 2, "row_length": 64}, "dpo": {"batch": 8, "max_length": 64, "epochs": 1},
        "preference": {"max_length": 64},
        "ppo": SIZES | {"iterations": 1, "minibatches": 2, "prompts": 8, "checks": {"step_zero": False}},
        "evaluate": SIZES | {"prompts": 8},
    })
    count = len(SEEN)
    result = pipeline.run(config, tmp_path / "run")
    assert [function for function, _ in SEEN[count:]].count("jit(packed_experience)") == 1  # Compiled ahead, for a host reward.
    assert result.report.exists()
    context = StageContext(config, tmp_path / "run", tmp_path / "run" / "sft", False)
    tokenizer = load_tokenizer(model)
    (messages, answer), *_ = answered(context, tokenizer)[0]
    batch, _ = packed(tokenizer, [(messages, answer)], "plain", 64)
    length = len(tokenizer.encode(messages[0].content)) + len(tokenizer.encode_segments([answer])) + 1
    assert tokenizer.decode(batch.tokens[0][: length - 1]) == messages[0].content + answer  # No roles, no markers.
    assert json.loads((tmp_path / "run" / "sft" / "summary.json").read_text())["data"]["rows"] == 25
    assert "1 rejected by the chat template or the style; dropped (lines 25)" in capsys.readouterr().out
    assert {json.loads(path.read_text())["config"]["data"]["style"] for path in (tmp_path / "run").glob("*/manifest.json")
            if "style" in json.loads(path.read_text())["config"].get("data", {})} == {"plain"}
