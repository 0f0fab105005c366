"""A model from outside is trained by LoRA PPO and written as a PEFT directory and as merged weights."""

from __future__ import annotations

import json

import chex
import numpy as np
import pytest

from tests import hugging, tiny

peft, torch = hugging.peft, hugging.torch

from jaxalign import pipeline  # noqa: E402
from jaxalign.config import from_config_dict  # noqa: E402
from jaxalign.errors import UserError  # noqa: E402
from jaxalign.models.adapters.lora import merge  # noqa: E402
from jaxalign.models.adapters.peft_folder import export_adapters, load_adapters  # noqa: E402
from jaxalign.registry.families import FAMILIES  # noqa: E402
from jaxalign.stages.shared import run_models  # noqa: E402
from jaxalign.stages.shared.base import StageContext  # noqa: E402
from jaxalign.steps.checkpoint import load_params  # noqa: E402
from jaxalign.tracking.metrics import read_metrics  # noqa: E402

pytestmark = pytest.mark.parity

REWARD = "def score(prompts, responses, **columns):\n    return [-len(r) / 100 for r in responses]\n"


def config(real_data, tmp_path, lora, step_zero=False, **changes):
    (tmp_path / "mine.py").write_text(REWARD)
    prompts = [{"prompt": f"Tell a story of {name}."} for name in ("Tim", "Lily", "a dog", "the sun")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return from_config_dict({
        "compile_cache": None, "stages": ("ppo",), "lora": lora,
        "model": {"source": "huggingface", "path": str(real_data / "stories260K" / "hf"), "max_length": 64},
        "data": {"source": "prompts_jsonl", "train": str(tmp_path / "prompts.jsonl"), "style": "hh", "held_out_share": 0.0},
        "reward": {"source": "callable", "callable": f"{tmp_path / 'mine.py'}:score"},
        "ppo": {"iterations": 1, "batch": 4, "minibatches": 2, "epochs": 2, "prompts": 4, "max_new_tokens": 8,
                "checks": {"sampler_gap": "stop", "step_zero": step_zero},
                "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0}},
    } | changes)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


def check_exports(made, tmp_path, own):
    """Check that adapters `own` give the same logits here, in `peft`, and as merged weights."""
    context = StageContext(made, tmp_path / "run", tmp_path / "run" / "ppo", False)
    model = run_models.make_model(made, 512)
    params = run_models.with_base(context, model, own)
    tokens = np.random.default_rng(0).integers(3, 512, (2, 12)).astype(np.int32)
    ours = np.asarray(tiny.all_logits(model, params, tokens))
    before = np.asarray(tiny.all_logits(model.base, run_models.base_params(context, model), tokens))
    assert np.abs(ours - before).max() > 1e-2
    export_adapters(tmp_path / "exported", FAMILIES.get("llama"), model, own, "stories260K")

    def base():
        return hugging.transformers.AutoModelForCausalLM.from_pretrained(made.model.path).eval()

    theirs = peft.PeftModel.from_pretrained(base(), tmp_path / "exported").eval()
    close(ours, hugging.logits(theirs, tokens))
    merged, alone = merge(model.lora, params), hugging.params_of(theirs.merge_and_unload())
    for name in ("query", "out"):
        np.testing.assert_allclose(merged["blocks"]["attention"][name], alone["blocks"]["attention"][name], atol=2e-6)
    close(ours, np.asarray(tiny.all_logits(model.base, merged, tokens)))


def test_a_stories_model_is_trained_and_exported_as_adapters_and_as_merged_weights(real_data, tmp_path):
    """With DoRA and the checks of step 0. The next test has LoRA."""
    made = config(real_data, tmp_path, {"rank": 4, "alpha": 8.0, "dora": True, "rank_stabilised": True}, step_zero=True)
    pipeline.run(made, tmp_path / "run")
    checks = json.loads((tmp_path / "run" / "ppo" / "checks.json").read_text())
    assert len(checks) == 5 and all(check["passed"] for check in checks)
    check_exports(made, tmp_path, load_params(tmp_path / "run" / "ppo" / "params", run_models.make_model(made, 512)))


def test_a_run_starts_from_a_peft_folder_and_refuses_changed_files(real_data, tmp_path):
    """The policy and its reference start as the model with those adapters; changed adapter files count as a changed run."""
    path = str(real_data / "stories260K" / "hf")
    settings = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    theirs = hugging.transformers.AutoModelForCausalLM.from_pretrained(path)
    hugging.randomised(peft.get_peft_model(theirs, settings)).save_pretrained(tmp_path / "peft")
    made = config(real_data, tmp_path, {"path": str(tmp_path / "peft")})
    pipeline.run(made, tmp_path / "run")
    (first,) = read_metrics(tmp_path / "run" / "ppo" / "metrics.jsonl")
    assert abs(first["kl_k1"]) < 1e-4
    model = run_models.make_model(made, 512)
    assert (model.lora.rank, model.lora.alpha, model.lora.targets) == (2, 3.0, ("attention.query", "mlp.down"))
    context = StageContext(made, tmp_path / "run", tmp_path / "run" / "ppo", False)
    start = run_models.policy_params(context, model, "ppo")
    _, given = load_adapters(tmp_path / "peft", FAMILIES.get("llama"), model.base)
    chex.assert_trees_all_equal(start["adapters"], given["adapters"])
    after = load_params(tmp_path / "run" / "ppo" / "params", model)
    moved = np.abs(after["adapters"]["attention"]["query"]["b"] - given["adapters"]["attention"]["query"]["b"]).max()
    assert 0 < moved < 0.1
    check_exports(made, tmp_path, after)
    other = hugging.transformers.AutoModelForCausalLM.from_pretrained(path)
    hugging.randomised(peft.get_peft_model(other, settings), 5).save_pretrained(tmp_path / "peft")
    with pytest.raises(UserError, match="adapter_model.safetensors"):
        pipeline.run(made, tmp_path / "run")
