"""The folder of a finished stage of a run as config.model.path of another run."""

from __future__ import annotations

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest

import jaxalign as ja
from jaxalign import convert, pipeline, plan
from jaxalign.config import from_config_dict, to_dict
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.data.tokenizers.sentence_piece import train_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.checkpoints.orbax import save_params
from jaxalign.registry.stages import STAGES
from jaxalign.stages.shared import reads, run_models
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.manifest import DONE, RUNNING, new_manifest
from jaxalign.storage import LocalStorage, write_json
from tests import made_tokenizers
from tests.folders import write_model

pytestmark = pytest.mark.medium

SIZES = {"layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp": 24}
TOKENS = np.arange(2, 26, dtype=np.int32).reshape(2, 12)


def finish(workdir, config, stage, params, status=DONE):
    """Write a stage's folder as if the stage had been run."""
    save_params(workdir / stage / "params", params)
    manifest = new_manifest(STAGES.get(stage).load("stage"), config, {})
    dataclasses.replace(manifest, status=status).write(LocalStorage(workdir))
    write_json(LocalStorage(workdir), "config.json", to_dict(config))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A LoRA run from scratch: pretrain, sft with adapters, a reward model and an unfinished ppo."""
    workdir = tmp_path_factory.mktemp("runs") / "scratch"
    config = resolve_auto(from_config_dict({"model": SIZES, "lora": {"rank": 2, "alpha": 4.0}}))
    train_tokenizer(made_tokenizers.TEXTS, 150, workdir / "pretrain" / "tokenizer.model")
    model = run_models.make_model(config, 150)
    base = model.base.init(jax.random.key(0))
    own = jax.tree.map(lambda x: x + 0.1, model.init_adapters(base, jax.random.key(1)))
    finish(workdir, config, "pretrain", base)
    finish(workdir, config, "sft", own)
    finish(workdir, config, "preference", own)
    finish(workdir, config, "ppo", own, RUNNING)
    return workdir


def run_on(path, **values):
    return from_config_dict({
        "stages": ("ppo",), "compile_cache": None, "model": {"source": "huggingface", "path": str(path), "max_length": 96},
        "data": {"source": "prompts_jsonl", "rl": "prompts.jsonl"}, "reward": {"source": "verifier"}} | values)


def same_model(path, config, workdir, ids=TOKENS):
    """Check that a run with this model.path starts from the model that load_model reads from there."""
    context = StageContext(resolve_auto(config), workdir, workdir / "ppo", False)
    tokenizer = run_models.load_tokenizer(context)
    model = run_models.make_model(config, tokenizer.vocab_size)
    params = run_models.start_params(context, model)
    expected = ja.load_model(path)
    assert tokenizer.vocab_size == expected.tokenizer.vocab_size and context.config.data.style == expected.style
    found = model.base.logits(params, model.base.hidden(params, ids))
    chex.assert_trees_all_close(found, expected.model.logits(expected.weights, expected.model.hidden(expected.weights, ids)),
                                atol=2e-5)
    return context.config.data.style


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
@pytest.mark.parametrize("lora", [{}, {"rank": 2}], ids=["full", "adapters"])
def test_a_run_starts_from_the_merged_weights_of_a_stage_from_scratch(scratch, tmp_path, stage, lora):
    assert same_model(scratch / stage, run_on(scratch / stage, lora=lora), tmp_path) == "compact"


def test_a_changed_stage_counts_as_a_changed_model(scratch):
    sft = {path.relative_to(scratch).as_posix() for path in reads.base_files(run_on(scratch / "sft"))}
    assert sft == {"sft/manifest.json", "pretrain/manifest.json", "pretrain/tokenizer.model"}
    base = {path.relative_to(scratch).as_posix() for path in reads.base_files(run_on(scratch / "pretrain"))}
    assert base == {"pretrain/manifest.json", "pretrain/tokenizer.model"}


@pytest.mark.parametrize(("stage", "message"), [
    ("ppo", "config.model.path: stage ppo is unfinished in .*; finish it first"),
    ("preference", "config.model.path: .*belongs to the stage preference, which does not train a language model; give one of "
                   "pretrain, sft, ppo"),
])
def test_a_stage_without_a_language_model_is_refused_at_the_start(scratch, tmp_path, stage, message):
    with pytest.raises(UserError, match=message) as error:
        pipeline.run(run_on(scratch / stage), tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run" / "config.json").exists()


def test_another_padding_of_the_tables_is_refused(scratch, tmp_path):
    values = {"source": "huggingface", "path": str(scratch / "sft"), "max_length": 96, "vocab_multiple": 64}
    config = run_on(scratch / "sft", model=values)
    context = StageContext(config, tmp_path, tmp_path, False)
    with pytest.raises(UserError, match="vocab_multiple is 64, but the stage .* was trained with 1; set it to that number"):
        run_models.base_params(context, run_models.make_model(config, 150))


def test_a_sequence_that_the_stage_was_not_trained_for_is_refused(scratch, tmp_path):
    config = run_on(scratch / "sft", model={"source": "huggingface", "path": str(scratch / "sft"), "max_length": 321})
    with pytest.raises(UserError, match="model.max_length is 321, but .* supports at most 320 positions"):
        run_models.base_params(StageContext(config, tmp_path, tmp_path, False), run_models.make_model(config, 150))


def test_a_plan_reads_the_sizes_of_a_stage(scratch, tmp_path, capsys):
    (tmp_path / "config.py").write_text(f"""
from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("dpo",)
    config.model.source, config.model.path, config.model.max_length = "huggingface", {str(scratch / "sft")!r}, 96
    config.data.source = "preferences_jsonl"
    config.dpo.max_length = 96
    return config
""")
    assert plan.main(["plan", f"--config={tmp_path / 'config.py'}", "--gpus=L4x1", "--examples=64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A finished LoRA run of sft on a chat model, and a finished second run of sft on that stage."""
    root = tmp_path_factory.mktemp("chat")
    rows = [{"prompt": f"What is {i} + {i}?", "chosen": f"It is {2 * i}.", "rejected": "No."} for i in range(12)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(path, workdir, rank):
        config = from_config_dict({
            "stages": ("sft",), "compile_cache": None, "lora": {"rank": rank},
            "model": {"source": "huggingface", "path": str(path), "max_length": 96},
            "data": {"source": "preferences_jsonl", "train": str(root / "pairs.jsonl")},
            "sft": {"batch_rows": 2, "row_length": 96, "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0}},
        })
        pipeline.run(config, workdir)
        return config

    first = run(write_model(root / "model"), root / "first", 2)
    second = run(root / "first" / "sft", root / "second", 0)
    return root, first, second


@pytest.mark.slow
def test_a_run_on_a_stage_of_a_chat_model_is_a_chat_run(chat):
    root, _, second = chat
    for run in ("first", "second"):
        assert json.loads((root / run / "config.json").read_text())["data"]["style"] == "chat"
    files = json.loads((root / "second" / "sft" / "manifest.json").read_text())["files"]
    assert str(root / "first" / "sft" / "manifest.json") in files and str(root / "model" / "model.safetensors") in files
    assert pipeline.find_changes(second, root / "second") == {}


@pytest.mark.slow
def test_a_third_run_starts_from_the_second(chat, tmp_path):
    """Stages of runs on stages are read to any depth: the second run trained all weights of the first one's merged model."""
    root = chat[0]
    assert same_model(root / "second" / "sft", run_on(root / "second" / "sft"), tmp_path) == "chat"
    first, second = (ja.load_model(root / run / "sft") for run in ("first", "second"))
    assert first.model.lora is not None and second.model.lora is None


@pytest.mark.slow
def test_the_stage_of_a_run_on_a_stage_is_exported(chat, tmp_path):
    root = chat[0]
    assert convert.main(["convert", f"--source={root / 'second' / 'sft'}", f"--target={tmp_path / 'hf'}"]) == 0
    ours, exported = ja.load_model(root / "second" / "sft"), ja.load_model(tmp_path / "hf")
    assert exported.style == "chat"
    chex.assert_trees_all_close(exported.weights, ours.weights, atol=1e-6)


def test_the_local_judge_reads_a_run_from_scratch(scratch):
    """A run on a stage from scratch may use the world's prompts and the local judge, which the compact style needs."""
    config = from_config_dict({"stages": ("revise", "sft"), "model": {
        "source": "huggingface", "path": str(scratch / "sft")}})
    assert resolve_auto(config).data.style == "compact"
