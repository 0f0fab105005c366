"""Reads and writes PEFT directories (adapter_config.json and adapter_model.safetensors), compatible with the `peft` library.

A module of several kernels, such as GPT-NeoX's query_key_value, has a single adapter in PEFT and one adapter per kernel here.
Reading gives every kernel an adapter with the same "a". Writing keeps the rank as long as the "a" are equal; once training has
made them differ, the written adapter has the sum of the ranks, with stacked "a" and block-diagonal "b". Both directions are
exact.

Letters: r rank, L layers; A [r, inputs] and B [outputs, r] are the stored weights.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes  # noqa: F401  # registers bfloat16 with numpy, which safetensors then returns
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxalign.data.tokenizers.export import folder_files
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import LoraAdapters
from jaxalign.models.adapters.peft_config import CONFIG, Adapted, AdaptedLinear, linear_modules, read_adapted
from jaxalign.models.checkpoints.export import TOKENIZER_FILES, check_target, copy_files, whole_folder, write_card
from jaxalign.models.checkpoints.safetensors import FLOATS, some
from jaxalign.models.model import Model, Params
from jaxalign.parallel import hosts
from jaxalign.registry.families import Family

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SCORE = f"{_PREFIX}score.weight"
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"


def load_adapters(folder: str | pathlib.Path, family: Family, base: Model) -> tuple[LoraAdapters, Params]:
    """Loads a PEFT directory. -> (settings, {"adapters", and "score" if it has one}), float32, sharded like `base`.

    Raises:
      UserError: the folder is incomplete or damaged, does not fit the model, or uses an unsupported feature.
    """
    folder = pathlib.Path(folder).expanduser()
    adapted = read_adapted(folder, family, base)
    tensors = _read(folder, _expected(adapted, base))
    tree: dict[str, Any] = {}
    lora = adapted.lora
    for module, lines in adapted.modules.items():
        names = [_PREFIX + module.format(layer=i) for i in range(base.config.layers)]
        A, B = (np.stack([tensors[name + kind] for name in names]) for kind in (_A, _B))
        for line in lines:
            own = _own(line, A, B, lora.rank, adapted.stacked(module))
            if lora.dora:
                own["magnitude"] = np.stack([line.split(tensors[name + _MAGNITUDE]) for name in names])
            tree.setdefault(line.part, {})[line.name] = own
    absent = [(line.part, line.name) for module, lines in adapted.modules.items() if adapted.stacked(module) for line in lines
              if not np.any(tree[line.part][line.name]["a"])]
    for part, name in absent:  # A block of zeros stands for a kernel without an adapter.
        del tree[part][name]
    gone = {f"{part}.{name}" for part, name in absent}
    lora = LoraAdapters(lora.rank, lora.alpha, tuple(t for t in lora.targets if t not in gone), lora.rank_stabilised, lora.dora)
    params: Params = {"adapters": tree} | ({"score": tensors[_SCORE].reshape(-1)} if adapted.scalar else {})
    model = Model(base.config, "scalar" if adapted.scalar else "lm", base.sharding, lora)
    shardings = model.shardings()
    # Copied, because buffers that numpy owns cannot be donated.
    return lora, jax.tree.map(lambda x: x.copy(), jax.device_put(params, shardings))


def _own(line: AdaptedLinear, A: np.ndarray, B: np.ndarray, rank: int, stacked: bool) -> dict[str, np.ndarray]:
    """"a" [L, in..., r] and "b" [L, r, out...] of a kernel, from its module's A [L, R, inputs] and B [L, outputs, R]."""
    L = len(A)
    b = np.stack([line.split(layer) for layer in B])
    if stacked:
        mine = slice(line.pick * rank, (line.pick + 1) * rank)
        A, b = A[:, mine], b[..., mine]
    return {"a": np.swapaxes(A, 1, 2).reshape(L, *line.inputs, rank), "b": np.moveaxis(b, -1, 1)}


def _expected(adapted: Adapted, base: Model) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all stored weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module, lines in adapted.modules.items():
        inputs, outputs = int(np.prod(lines[0].inputs)), sum(int(np.prod(line.outputs)) for line in lines)
        for layer in range(base.config.layers):
            name, rank = _PREFIX + module.format(layer=layer), adapted.ranks[module]
            shapes |= {name + _A: (rank, inputs), name + _B: (outputs, rank)}
            if adapted.lora.dora:
                shapes[name + _MAGNITUDE] = (outputs,)
    return shapes | ({_SCORE: (1, base.config.embed)} if adapted.scalar else {})


def _read(folder: pathlib.Path, expected: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    path = folder / WEIGHTS
    if not os.path.isfile(path):  # Unlike Path.is_file, False also for a name that is too long.
        pickled = os.path.exists(folder / "adapter_model.bin")
        other = " (adapter_model.bin is not read, because loading it may run code)" if pickled else ""
        raise UserError(f"{path} does not exist{other}; a PEFT folder has {CONFIG} and {WEIGHTS}")
    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            slices = {name: file.get_slice(name) for name in sorted(names & set(expected))}
            _check(path, names, expected, {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()})
            tensors = {name: file.get_tensor(name).astype(np.float32) for name in slices}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({error}); download or copy it again") from error
    if bad := [name for name, value in tensors.items() if not np.isfinite(value).all()]:
        raise UserError(f"{path}: {some(bad)} contains non-finite numbers; download or copy it again")
    return tensors


def _check(path: pathlib.Path, names: set[str], expected: dict, stored: dict) -> None:
    problems = []
    if missing := sorted(set(expected) - names):
        problems.append(f"weights are missing: {some(missing)}")
    if extra := sorted(names - set(expected)):
        problems.append(f"weights are unexpected according to {CONFIG}: {some(extra)}")
    if wrong := [f"{n} is {list(s)}, {list(expected[n])} expected" for n, (s, _) in stored.items() if s != expected[n]]:
        problems.append(f"shapes do not fit the model: {some(wrong)}")
    if odd := [f"{name} is {dtype}" for name, (_, dtype) in stored.items() if dtype not in FLOATS]:
        problems.append(f"weights are not in one of {', '.join(FLOATS)}: {some(odd)}")
    if problems:
        raise UserError(f"{path} does not contain the expected adapters: {'; '.join(problems)}")


def export_adapters(
    folder: str | pathlib.Path, family: Family, model: Model, params: Params, base_name: str = "",
    source: pathlib.Path | None = None, files: Mapping[str, str] | None = None, card: str = "",
) -> None:
    """Writes trained parameters as a PEFT directory, with the tokenizer. The write is atomic.

    model: with `lora`; a scalar head is written as "score". params: at least the trained ones. base_name: the base model's name
    for adapter_config.json. source: a folder whose tokenizer files are copied, as in `export`. files: the texts of further
    files, by name. card: the text of README.md; "" writes none. With several processes all must call it; the first one writes.

    Raises:
      UserError: the folder exists and is not empty, or DoRA adapts only some kernels of a module of several kernels.
    """
    folder = pathlib.Path(folder).expanduser().absolute()
    check_target(folder)
    own = {name: params[name] for name in model.abstract()}
    own = jax.jit(lambda x: x, out_shardings=model.sharding.replicated)(own)
    tree = jax.tree.map(np.asarray, own)
    tensors, patterns = _tensors(family, model, tree)
    content = json.dumps(_config(model, patterns, base_name), indent=2)
    with whole_folder(folder) as place:
        if hosts.is_first():
            save_file(tensors, place / WEIGHTS, metadata={"format": "pt"})
            (place / CONFIG).write_text(content + "\n", encoding="utf-8")
            converted = {} if source is None or files else folder_files(source)
            copy_files(place, source, TOKENIZER_FILES, converted | dict(files or {}))
            write_card(place, card)


def _tensors(family: Family, model: Model, tree: Params) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """-> (the weights to store, the rank of each module for adapter_config.json)."""
    tensors, ranks = {}, {}
    for module, lines in linear_modules(family, model).items():
        adapters = [tree["adapters"].get(line.part, {}).get(line.name) for line in lines]
        if not any(adapters):
            continue
        if model.lora.dora and not all(adapters):
            raise UserError(f"DoRA adapts only a part of {module}, which PEFT cannot express; adapt all of "
                            f"{', '.join(f'{line.part}.{line.name}' for line in lines)}, or none")
        shared = all(adapters) and all(np.array_equal(own["a"], adapters[0]["a"]) for own in adapters)
        ranks[module] = model.lora.rank * (1 if shared else len(lines))
        for layer in range(model.config.layers):
            name = _PREFIX + module.format(layer=layer)
            A, B = _module(lines, [None if own is None else (own["a"][layer], own["b"][layer]) for own in adapters],
                           model.lora.rank, shared)
            tensors |= {name + _A: A, name + _B: B}
            if model.lora.dora:
                tensors[name + _MAGNITUDE] = lines[0].fuse([own["magnitude"][layer] for own in adapters])
    if "score" in tree:
        tensors[_SCORE] = tree["score"][None]
    return {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}, ranks


def _module(lines: tuple[AdaptedLinear, ...], adapters: list, rank: int, shared: bool) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a module in one layer. adapters: (a, b) of each of its kernels, None for a kernel without an adapter."""
    width = rank if shared else rank * len(lines)
    A, parts = np.zeros((width, int(np.prod(lines[0].inputs))), np.float32), []
    for line, own in zip(lines, adapters, strict=True):
        part = np.zeros((*line.outputs, width), np.float32)
        if own is not None:
            mine = slice(0, rank) if shared else slice(line.pick * rank, (line.pick + 1) * rank)
            A[mine] = own[0].reshape(-1, rank).T
            part[..., mine] = np.moveaxis(own[1], 0, -1)
        parts.append(part)
    return A, lines[0].fuse(parts)


def _config(model: Model, ranks: dict[str, int], base_name: str) -> dict[str, Any]:
    lora, scalar = model.lora, model.head != "lm"
    short = {module: module.rpartition(".")[2] for module in ranks}
    larger = {short[module]: rank // lora.rank for module, rank in ranks.items() if rank != lora.rank}
    # PEFT divides alpha by the module's own, larger rank: raise alpha so that the scaling stays the same.
    growth = {name: times**0.5 if lora.rank_stabilised else times for name, times in larger.items()}

    def number(x: float) -> int | float:
        return int(x) if float(x).is_integer() else float(x)

    return {
        "peft_type": "LORA", "task_type": "SEQ_CLS" if scalar else "CAUSAL_LM",
        "base_model_name_or_path": base_name or None, "revision": None, "inference_mode": True,
        "r": lora.rank, "lora_alpha": number(lora.alpha), "lora_dropout": 0.0,
        "target_modules": sorted(short.values()), "rank_pattern": {name: lora.rank * times for name, times in larger.items()},
        "alpha_pattern": {name: number(lora.alpha * times) for name, times in growth.items()},
        "use_rslora": lora.rank_stabilised, "use_dora": lora.dora, "bias": "none", "fan_in_fan_out": False,
        "init_lora_weights": True, "layers_to_transform": None, "layers_pattern": None,
        "modules_to_save": ["score"] if scalar else None,
    }
