"""What the benchmarks of speed share: flags, the model they describe, timing, the machine, and how results are told.

Workload flags are named as those of the peers' scripts, so that one set of flags describes both sides (`versus.py`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jaxalign import errors
from jaxalign.config import Optimizer
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.model import Model, Params

WORKLOAD = {
    "layers": (6, "decoder layers"), "dim": (256, "width"), "heads": (8, "heads, for queries and for keys and values"),
    "ffn": (688, "width of the gated MLP"), "vocab": (4096, "tokens of the vocabulary"), "batch": (64, "rows of a step"),
    "prompt": (32, "tokens of a prompt"), "new": (64, "new tokens of a row, at most"), "steps": (3, "timed steps of a round"),
}  # fmt: skip
LEAST = {"vocab": 5, "length": 2}
"""Of flags that must be above 1: four tokens are special, and the first of a row is not predicted."""
WARM_UP = 2
"""Steps that count on neither side: what compiles or allocates is done then."""
STD = 0.02
"""Of random weights on every side: logits stay small, so that sampled tokens are close to evenly spread."""


def at_least(least: int) -> Callable[[str], int]:
    """The type of a flag that counts something."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is too small; {least} or more is expected")
        return int(text)

    return number


class Unused(argparse.Action):
    """A flag that is accepted, and of which nothing is kept."""

    def __call__(self, *_: Any) -> None:
        pass


class Parser(argparse.ArgumentParser):
    """Checks what concerns several flags. length: the default of --length, which is --prompt plus --new where one of them is
    given and it is not."""

    length: int | None = None

    def parse_args(self, *arguments: Any) -> argparse.Namespace:
        options = super().parse_args(*arguments)
        values = vars(options)
        if self.length is not None:
            parts = {name: values.pop(name) for name in ("prompt", "new") if name in values}
            added = sum(parts.get(name, WORKLOAD[name][0]) for name in ("prompt", "new"))
            values.setdefault("length", added if parts else self.length)
        if {"dim", "heads"} <= values.keys() and options.dim % options.heads:
            self.error(f"argument --heads: {options.heads} does not divide --dim, which is {options.dim}")
        return options


def make_parser(doc: str, *unused: str, length: tuple[int, str] | None = None, **defaults: int) -> Parser:
    """A parser with the flags of the workload and of telling. All benchmarks accept the same; `unused` names those that do not
    count in this one. length: default and meaning of --length, for rows that are not prompts with new tokens."""
    parser = Parser(description=doc.splitlines()[0], conflict_handler="resolve")  # A benchmark may say otherwise.
    flags: dict[str, dict[str, Any]] = {
        name: {"type": at_least(LEAST.get(name, 1)), "default": defaults.get(name, default), "help": meaning}
        for name, (default, meaning) in WORKLOAD.items()
    }
    flags["dtype"] = {"default": "float32", "choices": ("float32", "bfloat16"), "help": "of activations and products"}
    flags["seed"] = {"type": int, "default": 0}
    if length is not None:
        parser.length, meaning = length
        meaning += f"; --prompt plus --new where one of them is given, else {parser.length}"
        flags["length"] = {"type": at_least(LEAST["length"]), "default": argparse.SUPPRESS, "help": meaning}
        for name in ("prompt", "new"):
            flags[name] |= {"default": argparse.SUPPRESS, "help": "part of --length, where that is not given"}
    for name in unused:
        flags[name] |= {"action": Unused, "default": argparse.SUPPRESS, "help": "not used here"}
    for name, words in flags.items():
        parser.add_argument(f"--{name}", **words)
    parser.add_argument("--json", action="store_true", help="print one JSON object, and no table")
    parser.add_argument("--out", type=Path, help="write the same JSON object to this file")
    return parser


def run_main(main: Callable[[list[str]], int]) -> NoReturn:
    """Ends with the exit code of `main`; a mistake that the user can mend is told without a traceback, with code 1."""
    try:
        sys.exit(main(sys.argv[1:]))
    except errors.UserError as error:
        sys.exit(errors.tell(str(error), 1))


def decoder(options: argparse.Namespace) -> DecoderConfig:
    """The peers' Llama: tied embeddings, as many key/value heads as query heads."""
    return DecoderConfig(
        options.vocab, options.layers, options.dim, options.heads, options.heads, options.dim // options.heads, options.ffn,
        compute_dtype=options.dtype,
    )  # fmt: skip


def random_params(model: Model, seed: int) -> Params:
    """Weights as the peers' scripts draw them: every matrix and head from N(0, STD^2), norms 1."""
    shapes = model.abstract()
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def draw(path, leaf, key):
        names = [part.key for part in path]
        matrix = leaf.ndim - (names[0] == "blocks") >= 2 or names[0] == "score"
        return STD * jax.random.normal(key, leaf.shape, leaf.dtype) if matrix else jax.numpy.ones(leaf.shape, leaf.dtype)

    return jax.tree.unflatten(tree, [draw(path, leaf, key) for (path, leaf), key in zip(leaves, keys, strict=True)])


def parameter_count(model: Model) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(model.abstract()))


def product_weights(options: argparse.Namespace) -> int:
    """Weights that a token is multiplied with, the LM head's among them: two operations each, forward."""
    return options.layers * (4 * options.dim**2 + 3 * options.dim * options.ffn) + options.dim * options.vocab


def adamw(rate: float = 1e-5) -> Optimizer:
    return Optimizer(learning_rate=rate, schedule="constant")


def random_prompts(options: argparse.Namespace, count: int) -> list[list[int]]:
    """Prompts of `options.prompt` tokens each, without the first four ids, which stand for special tokens."""
    rng = np.random.default_rng(options.seed)
    return rng.integers(4, options.vocab, (count, options.prompt)).tolist()


class Compilations:
    """How many programs this process has compiled since it was made, those read from a cache included."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._seen)

    def _seen(self, event: str, seconds: float, **_: Any) -> None:
        del seconds
        self.count += event == "/jax/core/compile/backend_compile_duration"


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds until all arrays of the result are there, the result)."""
    began = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - began, result


def machine() -> dict[str, Any]:
    """What ran it: processor, devices, versions, commit, and how busy the machine was."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name"), "cores": os.cpu_count(), "memory": _first("/proc/meminfo", "MemTotal"),
        "backend": jax.default_backend(), "device": jax.devices()[0].device_kind, "devices": jax.device_count(),
        "python": platform.python_version(), "jax": jax.__version__,
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""), "load": os.getloadavg()[0], "commit": _commit(),
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _first(path: str, name: str) -> str:
    """The first value of that name in a file of `name: value` lines; empty where there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def _commit() -> str:
    """The commit of this checkout, with "+" where files differ from it, results not counted; empty where there is none."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "-uno", "--", ":/", ":(exclude,top)benchmarks/results")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def tell(options: argparse.Namespace, name: str, result: dict[str, Any], lines: list[str]) -> int:
    """Writes and prints a result: {"benchmark", "args", "machine", **result}, or its table `lines`. Returns 0."""
    plain = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items() if key != "scripts"}
    text = json.dumps({"benchmark": name, "args": plain, "machine": machine(), **result})
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text if options.json else "\n".join(lines), flush=True)
    return 0


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def median(values: list[float]) -> float:
    return float(statistics.median(values))
