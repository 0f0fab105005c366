"""Shared parts of the speed benchmarks: flags, the model, timing, the machine description, and result output.

Workload flags have the same names as in the peers' scripts, so that one set of flags describes both sides (`versus.py`).
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
    "layers": (6, "decoder layers"), "dim": (256, "width"), "heads": (8, "query heads, and as many key/value heads"),
    "ffn": (688, "width of the gated MLP"), "vocab": (4096, "vocabulary size"), "batch": (64, "rows per step"),
    "prompt": (32, "tokens per prompt"), "new": (64, "maximum new tokens per row"), "steps": (3, "timed steps per round"),
}
LEAST = {"vocab": 5, "length": 2}
"""Minimum of flags that must exceed 1: four tokens are special, and the first token of a row is not predicted."""
WARM_UP = 2
"""Steps that do not count on either side, because they compile and allocate."""
STD = 0.02
"""Standard deviation of random weights on both sides. Small logits make sampled tokens almost uniform."""


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least `least`."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is too small; {least} or more is expected")
        return int(text)

    return number


class Unused(argparse.Action):
    """A flag that is accepted and ignored."""

    def __call__(self, *_: Any) -> None:
        pass


class Parser(argparse.ArgumentParser):
    """Checks flags that depend on each other.

    length: the default of --length, unless --prompt or --new is given; then --length defaults to --prompt plus --new.
    """

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
    """Make a parser with the workload and output flags, which all benchmarks share.

    unused: flags that this benchmark ignores. length: default and help of --length, for rows that are not prompts with new
    tokens.
    """
    parser = Parser(description=doc.splitlines()[0], conflict_handler="resolve")  # A benchmark may override flags.
    flags: dict[str, dict[str, Any]] = {
        name: {"type": at_least(LEAST.get(name, 1)), "default": defaults.get(name, default), "help": meaning}
        for name, (default, meaning) in WORKLOAD.items()
    }
    flags["dtype"] = {"default": "float32", "choices": ("float32", "bfloat16"), "help": "dtype of activations and products"}
    flags["seed"] = {"type": int, "default": 0}
    if length is not None:
        parser.length, meaning = length
        meaning += f"; default: --prompt plus --new if one of them is given, else {parser.length}"
        flags["length"] = {"type": at_least(LEAST["length"]), "default": argparse.SUPPRESS, "help": meaning}
        for name in ("prompt", "new"):
            flags[name] |= {"default": argparse.SUPPRESS, "help": "part of --length, if --length is not given"}
    for name in unused:
        flags[name] |= {"action": Unused, "default": argparse.SUPPRESS, "help": "not used here"}
    for name, words in flags.items():
        parser.add_argument(f"--{name}", **words)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    return parser


def run_main(main: Callable[[list[str]], int]) -> NoReturn:
    """Exit with the code of `main`. A `UserError` is printed without a traceback, with exit code 1."""
    try:
        sys.exit(main(sys.argv[1:]))
    except errors.UserError as error:
        sys.exit(errors.print_error(str(error), 1))


def decoder(options: argparse.Namespace) -> DecoderConfig:
    """Return the peers' Llama: tied embeddings, as many key/value heads as query heads."""
    return DecoderConfig(
        options.vocab, options.layers, options.dim, options.heads, options.heads, options.dim // options.heads, options.ffn,
        compute_dtype=options.dtype,
    )


def random_params(model: Model, seed: int) -> Params:
    """Draw weights as the peers' scripts do: every matrix and head from N(0, STD^2), norms 1."""
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
    """Return the number of weights that multiply a token, including the LM head: two FLOPs each in the forward pass."""
    return options.layers * (4 * options.dim**2 + 3 * options.dim * options.ffn) + options.dim * options.vocab


def adamw(rate: float = 1e-5) -> Optimizer:
    return Optimizer(learning_rate=rate, schedule="constant")


def random_prompts(options: argparse.Namespace, count: int) -> list[list[int]]:
    """Draw prompts of `options.prompt` tokens each, without the first four ids, which are special tokens."""
    rng = np.random.default_rng(options.seed)
    return rng.integers(4, options.vocab, (count, options.prompt)).tolist()


class Compilations:
    """Counts the programs compiled in this process since construction, including those read from a cache."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._seen)

    def _seen(self, event: str, seconds: float, **_: Any) -> None:
        del seconds
        self.count += event == "/jax/core/compile/backend_compile_duration"


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return (seconds until all result arrays are ready, the result)."""
    began = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - began, result


def machine() -> dict[str, Any]:
    """Describe the machine: processor, devices, versions, commit and load."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name"), "cores": os.cpu_count(), "memory": _first("/proc/meminfo", "MemTotal"),
        "backend": jax.default_backend(), "device": jax.devices()[0].device_kind, "devices": jax.device_count(),
        "python": platform.python_version(), "jax": jax.__version__,
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""), "load": os.getloadavg()[0], "commit": _commit(),
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _first(path: str, name: str) -> str:
    """Return the first value of a name in a file of `name: value` lines, or an empty string."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def _commit() -> str:
    """Return the commit of this checkout, with "+" if files other than results differ from it; empty without git."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "-uno", "--", ":/", ":(exclude,top)benchmarks/results")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def report(options: argparse.Namespace, name: str, result: dict[str, Any], lines: list[str]) -> int:
    """Write and print a result: {"benchmark", "args", "machine", **result}, or its table `lines`. Returns 0."""
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
