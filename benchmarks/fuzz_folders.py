"""Model folders, tokenizers and work directories for `fuzz_readers.py`: how valid ones are made, and which code reads them."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path

from benchmarks.fuzz_mutations import all_of, mutate_bytes

TEXTS = ["the cat sat on the mat. Why did it sit there?", "A dog ran to the house, and barked!\n\nThen it slept."] * 8


def prepare_model(folder: Path) -> None:
    import jax

    from jaxalign.data.tokenizers import chatml, sentence_piece
    from jaxalign.data.tokenizers.load import load_tokenizer
    from jaxalign.models.architecture import DecoderConfig
    from jaxalign.models.checkpoints.export import export
    from jaxalign.models.families.llama import config_json
    from jaxalign.models.model import Model

    source = folder.with_name("tokenizer-files")
    source.mkdir()
    for name, content in chatml.train_files(TEXTS, 300).items():
        (source / name).write_text(content)
    tokenizer = load_tokenizer(source)
    model = Model(DecoderConfig(tokenizer.vocab_size, 2, 16, 4, 2, 4, 20))
    raw = config_json(model.config, 128) | {"eos_token_id": tokenizer.eos_id, "bos_token_id": None}
    whole = folder / "model"
    export(whole, model, model.init(jax.random.key(0)), config=raw, source=source)
    config = json.loads((whole / "config.json").read_text()) | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "attention_bias": False,
        "bos_token_id": 1,
    }
    (whole / "config.json").write_text(json.dumps(config))
    (whole / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>", "additional_special_tokens": []}))
    (whole / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_id], "bos_token_id": None}))
    shards = shutil.copytree(whole, folder / "sharded")
    (shards / "model.safetensors").rename(shards / "model-1.safetensors")
    from safetensors import safe_open

    with safe_open(shards / "model-1.safetensors", framework="numpy") as file:
        index = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), "model-1.safetensors")}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    other = shutil.copytree(whole, folder / "sentencepiece", ignore=shutil.ignore_patterns("tokenizer*", "*.safetensors"))
    size = sentence_piece.train_tokenizer(TEXTS, 150, other / "tokenizer.model").vocab_size
    added = {str(size): {"content": "<|im_end|>", "special": True}}
    settings = json.loads((source / "tokenizer_config.json").read_text()) | {
        "eos_token": "</s>",
        "pad_token": None,
        "added_tokens_decoder": added,
    }
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    (other / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size}))
    families = folder / "families"
    for model_type, fields in {
        "gemma3_text": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True, "layer_norm_eps": 1e-5},
        "qwen3": {"use_sliding_window": False},
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "gemma2": {"sliding_window": 64, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0},
        "mistral": {"sliding_window": 64},
    }.items():
        (families / model_type).mkdir(parents=True)
        plain = {name: value for name, value in raw.items() if name not in ("architectures", "rope_scaling")}
        plain |= {"model_type": model_type, **fields}
        if model_type.startswith(("gemma", "gpt")):
            plain["hidden_act"] = "gelu"
        (families / model_type / "config.json").write_text(json.dumps(plain))


def read_model(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign.models.checkpoints import huggingface
    from jaxalign.models.language_model import load_model

    source = (folder / given[0]).parent
    config = huggingface.read_config(source)
    if source.parent.name == "families" or not any(source.glob("*.safetensors")):
        config.decoder.frequencies()
    else:
        load_model(source, max_length=16)


def prepare_adapters(folder: Path) -> None:
    import jax

    from jaxalign.models.adapters.lora import LoraAdapters
    from jaxalign.models.adapters.peft_folder import export_adapters
    from jaxalign.models.model import Model
    from jaxalign.registry.families import FAMILIES

    base = _adapted_base()
    params = base.init(jax.random.key(0))
    for lora in (LoraAdapters(2, 4.0, ("*",)), LoraAdapters(2, 4.0, ("q_proj", "down_proj"), dora=True)):
        model = Model(base.config, lora=lora)
        own = model.init_adapters(params, jax.random.key(1))
        export_adapters(folder / ("dora" if lora.dora else "plain"), FAMILIES.get("llama"), model, own)


def read_adapters(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign.models.adapters.peft_folder import load_adapters
    from jaxalign.registry.families import FAMILIES

    load_adapters((folder / given[0]).parent, FAMILIES.get("llama"), _adapted_base())


def _adapted_base():
    from jaxalign.models.architecture import DecoderConfig
    from jaxalign.models.model import Model

    return Model(DecoderConfig(64, 2, 16, 4, 2, 4, 20))


def read_tokenizer(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign.data.chat.styles import encode_completion, encode_prompt
    from jaxalign.data.tokenizers.load import load_tokenizer
    from jaxalign.records import Message

    tokenizer = load_tokenizer((folder / given[0]).parent)
    ids = tokenizer.encode("the cat sat é <|im_end|> \ufffd\n")
    tokenizer.decode(ids)
    for token in (*ids[:20], tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size - 1, tokenizer.vocab_size + 5):
        tokenizer.piece(token)
    messages = [Message("user", "Why?"), Message("assistant", "So."), Message("user", "How?")]
    encode_prompt(tokenizer, messages, "hh")
    if tokenizer.files.chat_template is not None:
        encode_prompt(tokenizer, messages, "chat")
        encode_completion(tokenizer, messages, "So.", "chat")


def change_template(chance: random.Random, content: bytes) -> bytes:
    settings = json.loads(content)
    template = settings["chat_template"]
    settings["chat_template"] = mutate_bytes(chance, template.encode()).decode("utf-8", "surrogateescape")
    return json.dumps(settings).encode()


def prepare_run(folder: Path) -> None:
    from jaxalign import pipeline
    from jaxalign.config import from_config_dict

    pipeline.run(
        from_config_dict(
            {
                "compile_cache": None,
                "stages": ("pretrain", "report"),
                "world": {"tokens": 10_000, "topics": 12, "held_out_topics": 4, "vocab_size": 400},
                "model": {"layers": 1, "embed": 16, "mlp": 32, "heads": 2, "kv_heads": 2, "head_dim": 8, "max_length": 192},
                "pretrain": {"steps": 4, "batch_rows": 2, "row_length": 64, "checkpoint_every": 2},
            }
        ),
        folder / "run",
    )


def read_run(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign import pipeline
    from jaxalign.config.finished import finished_stage, language_model_stage
    from jaxalign.stages.shared.manifest import find_manifest
    from jaxalign.storage import LocalStorage
    from jaxalign.tracking.report.page import render_report

    run = folder / "run"
    config = _run_config(folder)
    all_of(
        lambda: finished_stage(run / "pretrain"),
        lambda: language_model_stage(run / "pretrain"),
        lambda: render_report(run),
        lambda: find_manifest(LocalStorage(run), "pretrain"),
        lambda: pipeline.find_changes(config, run),
    )


def _run_config(folder: Path):
    """The config of the unchanged run."""
    from jaxalign.config import finished

    return finished.finished_stage(folder.with_name("run-files") / "run" / "pretrain").config


def read_weights(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign.config.finished import language_model_stage
    from jaxalign.models.checkpoints.run_folder import stage_policy
    from jaxalign.parallel.mesh import make_mesh
    from jaxalign.parallel.sharding import Sharding
    from jaxalign.steps.checkpoint import Checkpointer

    if "/checkpoints/" in given[0]:
        with contextlib.closing(Checkpointer(folder / "run/pretrain/checkpoints")) as checkpointer:
            checkpointer.restore({})
    else:
        stage_policy(language_model_stage(folder / "run/pretrain"), Sharding(make_mesh()))
