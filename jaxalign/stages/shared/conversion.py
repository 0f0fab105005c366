"""Converts weights: Hugging Face to Orbax; Orbax, or a stage of a run, to Hugging Face.

An Orbax folder written here contains `params`, the model's config.json and the tokenizer files.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.config import Mesh
from jaxalign.config.finished import (
    FinishedStage,
    base_stage,
    finished_stage,
    is_model,
    is_stage,
    language_model_stage,
    read_json,
)
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json
from jaxalign.models.adapters.lora import join
from jaxalign.models.adapters.peft_folder import export_adapters
from jaxalign.models.checkpoints import huggingface
from jaxalign.models.checkpoints.export import check_target, config_fields, export, whole_folder, write_texts
from jaxalign.models.checkpoints.orbax import load_params, save_params
from jaxalign.models.checkpoints.run_folder import Base, base_of, frozen_base, merged, policy_model
from jaxalign.models.configured import configured_model
from jaxalign.models.model import Model, Params
from jaxalign.parallel import hosts
from jaxalign.parallel.sharding import make_sharding
from jaxalign.rewards.scorer import student_model
from jaxalign.tracking.cards.facts import read_facts
from jaxalign.tracking.cards.model import model_card

_STUDENT = {
    "num_hidden_layers": "layers", "hidden_size": "embed", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim", "intermediate_size": "mlp",
}


class Converted(NamedTuple):
    """A model with its weights, the fields of its config.json, the folder of its tokenizer, the texts of other files, notes for
    the user, and the text of its card, if any."""

    model: Model
    params: Params
    config: dict[str, Any]
    texts: Path
    files: Mapping[str, str] = types.MappingProxyType({})
    notes: tuple[str, ...] = ()
    card: str = ""


def convert(
    source: Path, target: Path, dtype: str | None, shard_bytes: int, mesh: tuple[int, int, int], adapters: bool = False
) -> list[str]:
    """Writes `target` atomically and returns sentences that report what was done.

    Args:
      source: a Hugging Face folder (converted to Orbax), or an Orbax folder written here or a stage's folder of a run
        (converted to Hugging Face).
      target: must be empty or not exist.
      dtype: of the written weights; None for the source's dtype.
      shard_bytes: size limit of a safetensors file.
      mesh: sizes of data, fsdp and tensor.
      adapters: write the adapters that the stage trained as a PEFT folder; otherwise they are merged into their base.

    Raises:
      UserError: the source is damaged or is none of these, or the target is not empty.
    """
    if not os.path.isdir(source):  # Unlike Path.is_dir, False also for a name that is too long.
        raise UserError(f"--source={source} is not a folder; give the folder of a model, or of a stage of a run")
    check_target(target)
    sharding = make_sharding(Mesh(*mesh))
    is_orbax = (source / "params").is_dir()
    if adapters:
        return [_export_adapters(source, target, Mesh(*mesh))]
    if is_orbax and not is_model(source):
        converted, dtype = _read_stage(source, Mesh(*mesh), dtype)
    else:
        if is_stage(source):  # It has no weights: it is unfinished, or trains no model.
            language_model_stage(source)
        config = huggingface.read_config(source)
        dtype = dtype or huggingface.own_dtype(config.raw)
        model = Model(config.decoder, config.head, sharding)
        if is_orbax:
            huggingface.check_mesh(model)
        params = load_params(source / "params", model, dtype) if is_orbax else huggingface.load_params(source, model, dtype)
        converted = Converted(model, params, config.raw, source)
    if is_orbax:
        export(
            target, converted.model, converted.params, config=converted.config, source=converted.texts, files=converted.files,
            dtype=dtype, shard_bytes=shard_bytes, card=converted.card,
        )
        raw = parse_json((target / "config.json").read_text(encoding="utf-8"))
    else:
        raw = converted.config
        with whole_folder(target) as temporary:
            save_params(temporary / "params", converted.params)
            if hosts.is_first():
                fields = config_fields(converted.model, raw, dtype)
                write_texts(temporary, fields, converted.texts, {}, generates=converted.model.head == "lm")
    names = ", ".join(raw.get("architectures") or [raw["model_type"]])
    form = "Hugging Face" if is_orbax else "Orbax"
    return [f"{source} ({names}) is now in {form} format in {target}, with dtype {dtype}", *converted.notes]


def _read_stage(source: Path, mesh: Mesh, dtype: str | None) -> tuple[Converted, str]:
    """The weights that a stage of a run wrote, with adapters merged into their base."""
    stage, base, model = _open_stage(source, mesh)
    fields, notes = dict(base.fields), ()
    if stage.name == "reward_distill":
        fields |= {
            name: getattr(model.config, ours) for name, ours in _STUDENT.items() if ours != "kv_heads" or name in fields
        }
    if model.head == "scalar":
        notes = (_normalisation(stage.directory, stage.weights),)
    dtype = dtype or "float32"
    if model.lora is None:
        params = load_params(stage.weights / "params", model, dtype)
        return Converted(model, params, fields, base.folder, base.files, notes, _card(stage, model, notes)), dtype
    frozen = frozen_base(stage.config, stage.workdir, model)
    whole, params = merged(model, join(frozen, load_params(stage.weights / "params", model)))
    notes = (f"the adapters of {stage.name} are merged into it", *notes)
    return Converted(whole, params, fields, base.folder, base.files, notes, _card(stage, model, notes)), dtype


def _card(stage: FinishedStage, model: Model, notes: Sequence[str] = (), adapters: bool = False) -> str:
    """The card of the model of a stage. The weights of a member of an ensemble have the card of its stage."""
    config, folder = stage.config, str(stage.directory.relative_to(stage.workdir.absolute()))
    pretrained = config.model.source == "huggingface" and base_stage(config) is None
    return model_card(
        read_facts(stage.workdir), folder, "policy" if model.head == "lm" else "reward",
        base=Path(config.model.path).expanduser() if pretrained else None, notes=notes, adapters=adapters,
    )


def _export_adapters(source: Path, target: Path, mesh: Mesh) -> str:
    if is_model(source) or not (source / "params").is_dir():
        raise UserError(f"--adapters exports the adapters of a stage, but {source} is a full model; omit --adapters")
    stage, base, model = _open_stage(source, mesh)
    if model.lora is None:
        raise UserError(f"{source} trained all weights (config.lora.rank is 0); omit --adapters")
    family = huggingface.parse_config(base.folder / "config.json", base.fields).family
    params = load_params(stage.weights / "params", model)
    export_adapters(target, family, model, params, stage.config.model.path, base.folder, base.files,
                    _card(stage, model, adapters=True))
    return f"the adapters of {source} are now in PEFT format in {target}"


def _open_stage(source: Path, mesh: Mesh) -> tuple[FinishedStage, Base, Model]:
    """A finished stage on this mesh, the base of its run, and the model whose parameters it wrote."""
    stage = finished_stage(source)
    stage = stage._replace(config=dataclasses.replace(stage.config, mesh=mesh))
    base = base_of(stage.config, stage.workdir)
    if stage.name in stage.language_model_stages:
        return stage, base, policy_model(stage, base.vocab, make_sharding(mesh))
    model = configured_model(stage.config, base.vocab, "scalar", make_sharding(mesh))
    if stage.name == "reward_distill":
        model = student_model(stage.config.reward_distill, model)
    huggingface.check_mesh(model)
    return stage, base, model


def _normalisation(stage: Path, folder: Path) -> str:
    """A sentence on how the run normalised the raw scores."""
    summary = read_json(stage / "summary.json")
    if "members" not in summary:
        return (f"its score is raw; the reward of this run was (score - shift) / scale with shift = {summary['shift']:.6g} and "
                f"scale = {summary['scale']:.6g}")
    member = summary["members"][int(folder.name.removeprefix("member-")) if folder != stage else 0]
    return (f"its score is the raw score of one member of {len(summary['members'])}; this run normalised it to (score - shift) "
            f"/ scale with shift = {member['shift']:.6g} and scale = {member['scale']:.6g}, and combined all members by "
            f"{summary['combine']} (the other members are in member-1, member-2 and so on)")
