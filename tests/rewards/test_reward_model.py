"""A reward model from outside whose tokenizer is not the policy's: scores, truncation, the mesh, RL with it, and mistakes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from jaxalign import pipeline
from jaxalign.config import RewardConfig, from_config_dict
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from jaxalign.parallel.mesh import make_mesh
from jaxalign.parallel.sharding import Sharding, one_device
from jaxalign.records import Message
from jaxalign.rewards.outside import load_reward_model
from jaxalign.tracking.metrics import read_metrics
from tests import made_tokenizers

pytestmark = pytest.mark.parity

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

_TURNS = ("the cat sat on the mat. Why did it sit there?", "It slept.", "a dog ran", "And barked!", "What is 2 + 2?")
_DIALOGUES = [[Message(("user", "assistant")[i % 2], text) for i, text in enumerate(_TURNS[:n])] for n in (5, 1, 3, 1, 3)]
_RESPONSES = ["It is 4.", "Once upon a time there was a fox. " * 3, "", "no", "You are a helpful assistant."]


def _classifier(folder, made=made_tokenizers.llama3, labels=1, **changes):
    made(folder)
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=24, intermediate_size=28, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=160, initializer_range=0.3, num_labels=labels,
        bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.eos_id, **changes,
    )
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama with a scalar head, whose pad token is its eos."""
    return _classifier(tmp_path_factory.mktemp("rewards") / "llama")


@pytest.mark.parametrize("made", [made_tokenizers.llama3, made_tokenizers.qwen, made_tokenizers.unigram])
@pytest.mark.parametrize("mesh", [None, (2, 2, 2)])
def test_scores_equal_those_of_transformers(tmp_path, made, mesh):
    folder = _classifier(tmp_path, made)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    theirs.config.pad_token_id = None  # One text at a time, so its last token is the last position: pad equals eos.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = []
    for messages, response in zip(_DIALOGUES, _RESPONSES, strict=True):
        whole = [{"role": m.role, "content": m.content} for m in (*messages, Message("assistant", response))]
        ids = tokenizer(tokenizer.apply_chat_template(whole, tokenize=False), add_special_tokens=False).input_ids
        expected.append(theirs(torch.tensor([ids])).logits[0, 0].item())
    model = load_reward_model(RewardConfig(model=str(folder), model_batch=3), Sharding(make_mesh(*(mesh or ()))))
    assert model.style == "chat"
    scores = model.score(_DIALOGUES, _RESPONSES)
    np.testing.assert_allclose(scores, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


def test_long_dialogues_lose_their_oldest_turns_and_have_no_score_if_still_too_long(folder):
    model = load_reward_model(RewardConfig(model=str(folder)), one_device())
    last = len(model.encode(_DIALOGUES[0][4:], _RESPONSES[0]))
    for style in ("chat", "hh"):
        model = load_reward_model(RewardConfig(model=str(folder), model_style=style, model_max_length=last + 3), one_device())
        assert model.encode(_DIALOGUES[0], _RESPONSES[0]) == model.encode(_DIALOGUES[0][4:], _RESPONSES[0])
        scores = model.score(_DIALOGUES[:2], _RESPONSES[:2])
        assert np.isfinite(scores).tolist() == [True, False]


_RUN = {
    "compile_cache": None, "data": {"source": "arithmetic"}, "arithmetic": {"largest": 3, "held_out_share": 0.2},
    "model": {"layers": 1, "embed": 32, "mlp": 64, "heads": 2, "kv_heads": 2, "head_dim": 8, "max_length": 16},
    "pretrain": {"steps": 0}, "stages": ("pretrain", "ppo"),
    "ppo": {"checks": {"step_zero": False},
            "iterations": 2, "batch": 16, "group_size": 4, "advantages": "grpo", "max_new_tokens": 3, "missing_eos": "none",
            "score_clip": 0.5},
}


def test_pitfall_20_a_reward_model_can_have_its_own_tokenizer(tmp_path):
    """Other systems pass the policy's ids to the reward model. Here its tokenizer knows none of them."""
    folder = _classifier(tmp_path / "judge")
    reward = {"source": "model+verifier", "model": str(folder), "model_shift": 0.25, "model_scale": 2.0}
    pipeline.run(from_config_dict(_RUN | {"reward": reward}), tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "ppo" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["score"] == pytest.approx(row["score_model"] + row["score_verifier"], abs=1e-5)
        assert 0 < abs(row["score_model"]) <= 0.5 and row["kept"] == 16
    manifest = json.loads((tmp_path / "run" / "ppo" / "manifest.json").read_text())
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.rpartition("/")[2] for path in manifest["files"]}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        pipeline.run(from_config_dict(_RUN | {"reward": reward}), tmp_path / "run")


def test_invalid_reward_models_and_settings_are_reported_in_one_sentence(folder, tmp_path):
    bare = _classifier(tmp_path / "bare", lambda folder: made_tokenizers.qwen(folder, None))
    cases = [
        (folder, {"model_style": "compact"}, "has no symbol '<user>', .* set it to 'chat'"),
        (bare, {"model_style": "chat"}, "has no chat template; set it to 'hh', or put"),
        (folder, {"model_max_length": 161}, "model_max_length is 161, but .* has only 160 positions"),
        (tmp_path / "none", {}, r"none, which has no config\.json"),
        (_classifier(tmp_path / "two", labels=2), {}, "2 labels; one label, the reward, is expected"),
    ]
    for place, settings, message in cases:
        with pytest.raises(UserError, match=message):
            load_reward_model(RewardConfig(model=str(place), **settings), one_device())
    assert load_reward_model(RewardConfig(model=str(bare)), one_device()).style == "hh"
    (bare / "config.json").write_text((bare / "config.json").read_text().replace("SequenceClassification", "CausalLM"))
    with pytest.raises(UserError, match="a LlamaForCausalLM; a LlamaForSequenceClassification with one label"):
        load_reward_model(RewardConfig(model=str(bare)), one_device())


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"source": "model"}, "config.reward.model is empty .*; set it to the model's folder"),
        ({"model": "judge"}, "config.reward.model is 'judge', which has no effect when config.reward.source is 'preference'"),
        ({"source": "model", "model": "judge", "model_scale": 0.0}, "model_scale"),
    ],
)
def test_a_reward_model_must_be_configured_exactly_where_it_is_used(reward, message):
    with pytest.raises(UserError, match=message):
        from_config_dict({"reward": reward})


def test_a_reward_model_needs_no_preference_stage():
    config = from_config_dict({"reward": {"source": "model", "model": "judge"}, "stages": ("pretrain", "ppo")})
    assert dataclasses.asdict(config.reward)["model_style"] == "auto"
