"""Reads adapter_config.json of a PEFT directory: which linear layers of a decoder it adapts, and how.

A field that is not supported here raises an error with its name; it is never ignored.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import os
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np
import regex

from jaxalign.data.sources.jsonl import read_object
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import LINEAR, LoraAdapters
from jaxalign.models.checkpoints.safetensors import some
from jaxalign.models.families.base import Fields
from jaxalign.models.model import Model
from jaxalign.registry.families import Family

CONFIG = "adapter_config.json"

# Fields that do not affect the outputs of trained adapters.
_HARMLESS = frozenset((
    "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode", "megatron_core",
    "qalora_group_size", "loftq_config", "eva_config", "runtime_config", "ensure_weight_tying", "lora_dropout", "peft_type",
    "task_type", "r", "lora_alpha", "target_modules", "exclude_modules", "modules_to_save", "rank_pattern", "alpha_pattern",
    "use_rslora", "use_dora",
))
_ALONE = {  # Fields that are supported only with these values (or absent).
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # Others also change the base.
}


class AdaptedLinear(NamedTuple):
    """A linear layer of the decoder and the module that holds it in the family's files.

    part, name: the decoder's names. If the module holds several of the decoder's kernels (for example queries, keys and
    values), this one is part `pick` of `parts` along axis `axis` of the module's outputs; with axis None the kernels' outputs
    follow each other, and those of this one begin at `start`. inputs, outputs: the sizes of the kernel's axes.
    """

    part: str
    name: str
    pick: int
    parts: int
    axis: int | None
    start: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def split(self, value: np.ndarray) -> np.ndarray:
        """[module's outputs, ...] to this kernel's [*outputs, ...]."""
        if self.axis is None:
            return value[self.start : self.start + math.prod(self.outputs)].reshape(*self.outputs, *value.shape[1:])
        axes = (*self.outputs[: self.axis], self.parts, *self.outputs[self.axis :])
        return value.reshape(*axes, *value.shape[1:]).take(self.pick, axis=self.axis)

    def fuse(self, values: list[np.ndarray]) -> np.ndarray:
        """One [*outputs, ...] for each part to [module's outputs, ...]."""
        rest = values[0].shape[len(self.outputs) :]
        if self.axis is None:
            return np.concatenate([value.reshape(-1, *rest) for value in values])
        return np.stack(values, axis=self.axis).reshape(-1, *rest)


@dataclasses.dataclass(frozen=True)
class Adapted:
    """The contents of adapter_config.json.

    modules: the decoder's linear layers for each stored module; ranks: the stored rank of each module; scalar: whether a
    scalar head is also saved.
    """

    lora: LoraAdapters
    modules: dict[str, tuple[AdaptedLinear, ...]]
    ranks: dict[str, int]
    scalar: bool

    def stacked(self, module: str) -> bool:
        """Whether a module of several kernels stacks one adapter per kernel, rather than sharing one adapter."""
        return self.ranks[module] != self.lora.rank


def linear_modules(family: Family, model: Model) -> dict[str, tuple[AdaptedLinear, ...]]:
    """Every module of a block that can have adapters, in the order of the family's weights."""
    blocks = model.base.abstract()["blocks"]
    stored: dict[str, list] = collections.defaultdict(list)
    for weight in family.load("weights")(model.config):
        key = weight.path[1:]
        if weight.path[0] == "blocks" and key in LINEAR and "{expert}" not in weight.stored:
            stored[weight.stored.removesuffix(".weight")].append((key, weight))
    modules = {}
    for module, entries in stored.items():
        parts, start = [], 0
        for (part, name), weight in sorted(entries, key=lambda entry: entry[1].pick):
            outputs = re.match(r"\(([^)]*)\)|(\S+)", weight.layout)
            letters = (outputs[1] or outputs[2]).split()
            _, *shape = blocks[part][name].shape
            count = LINEAR[part, name][0]
            axis = letters.index("n") if "n" in letters else None
            sizes = tuple(shape[:count]), tuple(shape[count:])
            parts.append(AdaptedLinear(part, name, weight.pick, len(entries), axis, start, *sizes))
            start += math.prod(sizes[1])
        modules[module] = tuple(parts)
    return modules


def read_adapted(folder: str | pathlib.Path, family: Family, model: Model) -> Adapted:
    """Reads adapter_config.json. model: the base.

    Raises:
      UserError: the file is missing or malformed, or has an unsupported field (the error gives its name and value).
    """
    path = pathlib.Path(folder).expanduser() / CONFIG
    if not os.path.isfile(path):
        raise UserError(f"{path} does not exist; a PEFT folder has {CONFIG} and adapter_model.safetensors")
    raw = read_object(path)
    _refuse(path, raw)
    modules = linear_modules(family, model)
    chosen = _chosen(path, raw, modules, model.config.layers)
    fields = Fields(path, {"r": 8, "lora_alpha": 8} | raw)  # PEFT's defaults.
    rank, alpha = fields.integer("r"), fields.real("lora_alpha")
    flags = {name: raw.get(name) or False for name in ("use_rslora", "use_dora")}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise UserError(f"{path}: {name} is {value!r}; true or false is expected")
    targets = tuple(f"{line.part}.{line.name}" for module in chosen for line in modules[module])
    lora = LoraAdapters(rank, alpha, targets, flags["use_rslora"], flags["use_dora"])
    ranks = {module: _effective(path, raw, "rank_pattern", module, rank, model.config.layers) for module in chosen}
    whole = {own_rank for module, own_rank in ranks.items() if len(modules[module]) == 1}
    if len(whole) == 1 and rank not in whole:  # rank_pattern overrides r everywhere.
        rank = whole.pop()
        lora = dataclasses.replace(lora, rank=rank)
    alphas = {module: _effective(path, raw, "alpha_pattern", module, alpha, model.config.layers) for module in chosen}
    scaling = {m: dataclasses.replace(lora, rank=ranks[m], alpha=float(alphas[m])).scaling for m in chosen}
    for module in chosen:
        if ranks[module] not in (rank, rank * len(modules[module])):
            raise UserError(f"{path}: rank_pattern gives {module} rank {ranks[module]} and others {rank}; the same rank for "
                            "all adapters is expected")
    first = scaling[chosen[0]]
    for module in chosen:
        if abs(scaling[module] - first) > 1e-6 * first:
            raise UserError(f"{path}: alpha_pattern scales the adapter of {module} by {scaling[module]:.4g} and that of "
                            f"{chosen[0]} by {first:.4g}; the same scaling for all adapters is expected")
    lora = dataclasses.replace(lora, alpha=first * (rank**0.5 if lora.rank_stabilised else rank))
    if abs(lora.alpha - alpha) <= 1e-6 * alpha:
        lora = dataclasses.replace(lora, alpha=alpha)
    saved = raw.get("modules_to_save") or []
    return Adapted(lora, {m: modules[m] for m in chosen}, ranks, "score" in saved)


def _refuse(path: pathlib.Path, raw: dict[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {raw.get('peft_type')!r}, which is not supported; 'LORA' is expected")
    for name, values in _ALONE.items():
        if raw.get(name) is not None and raw[name] not in values:
            raise UserError(f"{path}: {name} is {raw[name]!r}, which is not supported; {values[0]!r} is expected")
    for name, value in raw.items():
        if name not in _HARMLESS and name not in _ALONE and value not in (None, False, "", [], {}):
            raise UserError(f"{path}: {name} is {str(value)[:60]!r}, which is not supported; remove it only if the adapters "
                            "compute the same without it")
    _check_names(path, "modules_to_save", saved := raw.get("modules_to_save") or [])
    if other := sorted(set(saved) - {"score", "classifier"}):
        raise UserError(f"{path}: modules_to_save has {some(other)}; only the scalar head, 'score', can be saved with "
                        "the adapters")
    if raw.get("lora_dropout"):
        logging.getLogger("jaxalign").warning("%s: lora_dropout is %s; dropout is not used here", path, raw["lora_dropout"])


def _check_names(path: pathlib.Path, field: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        expected = "names" if field == "modules_to_save" else "names or a pattern"
        raise UserError(f"{path}: {field} is {value!r}; a list of {expected} is expected")


def _chosen(path: pathlib.Path, raw: dict[str, Any], modules: dict, layers: int) -> list[str]:
    """The modules that target_modules matches by PEFT's rules. Raises UserError if it names modules that cannot have adapters,
    or does not match a module in all layers."""
    targets, without = raw.get("target_modules"), raw.get("exclude_modules")
    for name, value in (("target_modules", targets), ("exclude_modules", without)):
        if value is not None and not isinstance(value, str):
            _check_names(path, name, value)
    names = {module: [module.format(layer=i) for i in range(layers)] for module in modules}
    everything = [name for both in names.values() for name in both]
    if isinstance(targets, list):
        odd = [target for target in targets if not any(_matches(path, [target], name) for name in everything)]
        if odd:
            raise UserError(f"{path}: target_modules has {some(sorted(odd))}, which cannot have adapters here; the linear "
                            f"layers of attention and MLP can: {some([m.rpartition('.')[2] for m in modules])}")
    chosen = []
    for module, both in names.items():
        hit = [targets == "all-linear" or _matches(path, targets, name) for name in both]
        hit = [h and not (without and _matches(path, without, name)) for h, name in zip(hit, both, strict=True)]
        if any(hit) and not all(hit):
            raise UserError(f"{path}: target_modules matches {module.format(layer=hit.index(True))} but not "
                            f"{module.format(layer=hit.index(False))}; adapters in all layers are expected")
        chosen += [module] if any(hit) else []
    if not chosen:
        raise UserError(f"{path}: target_modules is {targets!r}, which matches no linear layer of this model")
    return chosen


def _matches(path: pathlib.Path, targets: list[str] | str | None, name: str) -> bool:
    if isinstance(targets, str):
        return _full_match(path, targets, name)
    return any(name == target or name.endswith(f".{target}") for target in targets or ())


def _full_match(path: pathlib.Path, pattern: str, name: str) -> bool:
    try:
        return regex.fullmatch(pattern, name, timeout=_MATCH_SECONDS) is not None
    except TimeoutError:
        raise UserError(f"{path}: {pattern!r} takes more than {_MATCH_SECONDS:.0f} s to match a name; simplify it") from None
    except (regex.error, RecursionError) as error:
        raise UserError(f"{path}: {pattern!r} is not a regular expression ({error})") from error


_MATCH_SECONDS = 1.0


def _effective(path: pathlib.Path, raw: dict[str, Any], field: str, module: str, usual: float, layers: int):
    """The rank or alpha of a module, which must be the same in all layers."""
    patterns = raw.get(field) or {}
    if not isinstance(patterns, dict):
        raise UserError(f"{path}: {field} is {patterns!r}; an object is expected")
    values, fields = set(), Fields(path, patterns)
    read = fields.integer if field == "rank_pattern" else fields.real
    for layer in range(layers):
        name = module.format(layer=layer)
        key = next((key for key in patterns if _full_match(path, rf"(.*\.)?({key})", name)), None)
        values.add(usual if key is None else read(key))
    if len(values) > 1:
        raise UserError(f"{path}: {field} differs between the layers of {module}; one value for all layers is expected")
    return values.pop()
