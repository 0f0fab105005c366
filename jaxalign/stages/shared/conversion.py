"""Weights from one layout to the other: Hugging Face to Orbax; Orbax, or a stage of a run, to Hugging Face.

An Orbax folder made here has `params` and beside it the model's config.json and tokenizer files.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.config import POLICY_STAGES, Config, Mesh, schema
from jaxalign.data.tokenizers.export import tokenizer_files
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import join, merge
from jaxalign.models.adapters.peft_folder import export_adapters
from jaxalign.models.adapters.quantised import quantise
from jaxalign.models.checkpoints import huggingface
from jaxalign.models.checkpoints.export import DTYPES, check_target, config_fields, export, whole_folder, write_texts
from jaxalign.models.families.llama import config_json
from jaxalign.models.families.registry import FAMILIES
from jaxalign.models.model import Model, Params
from jaxalign.parallel import hosts
from jaxalign.parallel.sharding import Sharding, make_sharding
from jaxalign.rewards.scorer import student_model
from jaxalign.stages.shared import common
from jaxalign.stages.shared.base import DONE, read_manifest
from jaxalign.training.checkpoint import load_params, save_params

_STUDENT = {
    "num_hidden_layers": "layers", "hidden_size": "embed", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim", "intermediate_size": "mlp",
}  # fmt: skip


class Found(NamedTuple):
    """A model with its weights, the fields of its config.json, the folder of its tokenizer, texts of further files, and what
    is to be said of it."""

    model: Model
    params: Params
    config: dict[str, Any]
    texts: Path
    files: Mapping[str, str] = types.MappingProxyType({})
    notes: tuple[str, ...] = ()


class FinishedStage(NamedTuple):
    """A stage's name, its folder, that of the weights (another one for a member of an ensemble), and the run's config as the
    stage was made with it, without its mesh."""

    name: str
    directory: Path
    weights: Path
    config: Config


def convert(
    source: Path, target: Path, dtype: str | None, shard_bytes: int, mesh: tuple[int, int, int], adapters: bool = False
) -> list[str]:
    """Writes `target`, whole or not at all; returns sentences on what was done.

    Args:
      source: a Hugging Face folder (which becomes an Orbax one), an Orbax folder made here, or a stage's folder of a run.
      target: must not exist, or be empty.
      dtype: of the weights written; None for the source's own.
      shard_bytes: the largest safetensors file.
      mesh: sizes of data, fsdp and tensor.
      adapters: of a stage that trained adapters, write them as a PEFT folder; else they are merged into their base.

    Raises:
      UserError: the source is none of these or damaged, or the target is in use.
    """
    if not source.is_dir():
        raise UserError(f"--source={source} is not a folder; give a model folder, or a stage's folder of a run")
    check_target(target)
    sharding = make_sharding(Mesh(*mesh))
    if adapters:
        if is_model(source) or not (source / "params").is_dir():
            raise UserError(f"--adapters asks for those that a stage has trained, but {source} is a whole model; leave it out")
        return [_export_adapters(source, target, Mesh(*mesh))]
    if not (source / "params").is_dir():
        config = huggingface.read_config(source)
        dtype = dtype or own_dtype(config.raw)
        model = Model(config.decoder, config.head, sharding)
        _write_orbax(target, Found(model, huggingface.load_params(source, model, dtype), config.raw, source), dtype)
        return [f"{source} ({_named(config.raw)}) is now in Orbax's layout in {target}, in {dtype}"]
    found, dtype = _read_orbax(source, sharding, dtype) if is_model(source) else _read_stage(source, Mesh(*mesh), dtype)
    export(
        target, found.model, found.params, config=found.config, source=found.texts, files=found.files, dtype=dtype,
        shard_bytes=shard_bytes,
    )  # fmt: skip
    written = json.loads((target / "config.json").read_text(encoding="utf-8"))
    return [f"{source} ({_named(written)}) is now in Hugging Face's layout in {target}, in {dtype}", *found.notes]


def _named(raw: Mapping[str, Any]) -> str:
    return ", ".join(raw.get("architectures") or [raw["model_type"]])


def own_dtype(raw: Mapping[str, Any]) -> str:
    """The dtype of the weights beside a config.json."""
    found = raw.get("dtype", raw.get("torch_dtype"))
    return found if found in DTYPES else "float32"


def is_model(folder: Path) -> bool:
    """Whether the folder has a model's config.json."""
    return "model_type" in _json(folder / "config.json")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); put the file back") from None
    return found if isinstance(found, dict) else {}


def _write_orbax(target: Path, found: Found, dtype: str) -> None:
    with whole_folder(target) as temporary:
        save_params(temporary / "params", found.params)
        config = config_fields(found.model, found.config, dtype)
        if hosts.is_first():
            write_texts(temporary, config, found.texts, {}, generates=found.model.head == "lm")


def _read_orbax(source: Path, sharding: Sharding | None, dtype: str | None) -> tuple[Found, str]:
    config = huggingface.read_config(source)
    dtype = dtype or own_dtype(config.raw)
    model = Model(config.decoder, config.head, sharding)
    huggingface.check_mesh(model)
    return Found(model, load_params(source / "params", model, dtype), config.raw, source), dtype


def _read_stage(source: Path, mesh: Mesh, dtype: str | None) -> tuple[Found, str]:
    """The weights that a stage of a run has written; adapters merged into their base."""
    kind, stage, folder, config = finished_stage(source)
    config = dataclasses.replace(config, mesh=mesh)
    raw, texts, vocab = _base(config, stage.parent)
    model, notes = _stage_model(config, kind, vocab), ()
    if kind == "reward_distill":
        raw |= {name: getattr(model.config, ours) for name, ours in _STUDENT.items() if ours != "kv_heads" or name in raw}
    files = tokenizer_files(texts / "tokenizer.model") if config.model.source == "scratch" else {}
    if model.head == "scalar":
        notes = (_normalisation(stage, folder),)
    dtype = dtype or "float32"
    if model.lora is None:
        return Found(model, load_params(folder / "params", model, dtype), raw, texts, files, notes), dtype
    merged = merge(model.lora, join(_frozen(config, stage.parent, model), load_params(folder / "params", model)))
    whole = dataclasses.replace(model, lora=None)
    merged = {name: value for name, value in merged.items() if name in whole.abstract()}
    return Found(whole, merged, raw, texts, files, (f"the adapters of {kind} are merged into it", *notes)), dtype


def _frozen(config: Config, workdir: Path, model: Model) -> Params:
    """The base under a stage's adapters, as the stage had it: quantised where it was."""
    if config.model.source == "huggingface":
        return quantise(huggingface.load_params(config.model.path, model.base), config.lora.base)
    return quantise(load_params(workdir / "pretrain" / "params", model.base), config.lora.base)


def _export_adapters(source: Path, target: Path, mesh: Mesh) -> str:
    kind, stage, folder, config = finished_stage(source)
    config = dataclasses.replace(config, mesh=mesh)
    _, _, vocab = _base(config, stage.parent)
    model = _stage_model(config, kind, vocab)
    if model.lora is None:
        raise UserError(f"{source} trained all weights (config.lora.rank is 0); leave out --adapters")
    outside = config.model.source == "huggingface"
    family = huggingface.read_config(config.model.path).family if outside else FAMILIES["llama"]
    export_adapters(target, family, model, load_params(folder / "params", model), config.model.path)
    return f"the adapters of {source} are now in PEFT's layout in {target}"


def finished_stage(source: Path) -> FinishedStage:
    """What `source`, the folder of a finished stage or of a member of its ensemble, was made with.

    Raises:
      UserError: no stage has written it, or one that is half done.
    """
    folder = source.absolute()
    stage = folder.parent if folder.name.startswith("member-") else folder
    manifest = read_manifest(stage)
    if manifest is None:
        raise UserError(f"{source} holds params, but neither a model's config.json nor a stage's manifest.json; give a folder "
                        "that jaxalign.convert made, or a stage's folder of a run")  # fmt: skip
    if manifest.status != DONE:
        raise UserError(f"stage {manifest.stage} is half done in {stage}; run it to its end first")
    return FinishedStage(manifest.stage, stage, folder, _run_config(stage.parent, manifest.config))


def _run_config(workdir: Path, made_with: Mapping[str, Any]) -> Config:
    """The run's config, with what the stage was made with where another config came later."""
    values = _json(workdir / "config.json")
    if "stages" not in values:
        raise UserError(f"{workdir} has no config.json of a run; give a stage's folder where the run wrote it")
    for dotted, value in made_with.items():
        *parents, last = dotted.split(".")
        node = values
        for parent in parents:
            node = node[parent]
        node[last] = value
    values.pop("mesh", None)  # That of the run need not be here.
    return schema.from_mapping(Config(), values)


def _base(config: Config, workdir: Path) -> tuple[dict[str, Any], Path, int]:
    """(config.json's fields, the tokenizer's folder, the vocabulary's size) of a run's models."""
    if config.model.source == "huggingface":
        texts = Path(config.model.path).expanduser()
        found = huggingface.read_config(texts)
        return dict(found.raw), texts, found.decoder.vocab
    texts = workdir / "pretrain"
    tokenizer = load_tokenizer(texts / "tokenizer.model")
    raw = config_json(common.make_model(config, tokenizer.vocab_size).config, config.model.max_length)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return raw | ids, texts, tokenizer.vocab_size


def _stage_model(config: Config, stage: str, vocab: int) -> Model:
    head = "lm" if stage in ("pretrain", *POLICY_STAGES) else "scalar"
    made = common.make_model(config, vocab, head)
    if stage == "reward_distill":
        made = student_model(config.reward_distill, made)
    model = Model(made.config, head, made.sharding, None if stage == "pretrain" else made.lora)
    huggingface.check_mesh(model)
    return model


def _normalisation(stage: Path, folder: Path) -> str:
    """What the raw scores were brought to in the run."""
    summary = _json(stage / "summary.json")
    if "members" not in summary:
        return (f"its score is raw; this run was rewarded by (score - shift) / scale with shift = {summary['shift']:.6g} and "
                f"scale = {summary['scale']:.6g}")  # fmt: skip
    member = summary["members"][int(folder.name.removeprefix("member-")) if folder != stage else 0]
    return (f"its score is raw, and that of one member of {len(summary['members'])}; this run took (score - shift) / scale "
            f"with shift = {member['shift']:.6g} and scale = {member['scale']:.6g}, and the {summary['combine']} of "
            "all members (the others are in member-1 and on)")  # fmt: skip
