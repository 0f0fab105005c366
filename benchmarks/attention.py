"""Time the attention kernels at published head shapes and compare their results: `python benchmarks/attention.py`.

Forward and backward of the platform's fused kernel (cuDNN on an NVIDIA GPU, splash attention on a TPU) and of the plain
implementation, in bfloat16, over rows of one document, of three packed documents, and with a window. "error" is the largest
difference from the formula in float32 at full precision, relative to the largest value, over the result and the gradients of
queries, keys and values of two rows. FLOPs are those of causal attention without the masked half, three times the forward pass.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from common import at_least, median, progress, report, run_main, timed

from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.attention.dispatch import attention, kind_of_attention
from jaxalign.parallel.sharding import one_device

WARM_UP = 2


class Heads(NamedTuple):
    """Query heads, key/value heads and their size."""

    queries: int
    keys: int
    size: int


MODELS = {"Llama-3.2-1B": Heads(32, 8, 64), "Llama-3.1-8B": Heads(32, 8, 128), "Qwen3-0.6B": Heads(16, 8, 128)}
ROWS = {"documents": {}, "packed": {"packed": True}, "window": {"window": 256}}


def decoder(heads: Heads, attention: str, dtype: str, window: int | None = None) -> DecoderConfig:
    return DecoderConfig(64, 1, heads.queries * heads.size, heads.queries, heads.keys, heads.size, 64, window=window,
                         compute_dtype=dtype, attention=attention)


def step(config: DecoderConfig, kind: str, shape: tuple[int, int], segments: jax.Array | None) -> Callable:
    """Return a jitted function of (q, k, v, weight) that returns the result and the gradients of its product with weight."""

    def loss(q, k, v, weight):
        attend = attention(kind, config, one_device(), shape, segments)
        result = attend(q, k, v, None)
        return jnp.sum(result.astype(jnp.float32) * weight), result

    def both(q, k, v, weight):
        (_, result), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v, weight)
        return result, *gradients

    return jax.jit(both)


@functools.partial(jax.jit, static_argnames=("heads", "window", "packed"))
def errors(results, q, k, v, weight, *, heads: Heads, window: int | None, packed: bool) -> jax.Array:
    """Return the error of the result and of each gradient, float32 [4], for the first rows of a batch."""
    place = jnp.arange(q.shape[1])
    segments = document(q.shape[1], packed)
    seen = (place[:, None] >= place[None, :]) & (segments[:, None] == segments[None, :])
    if window is not None:
        seen &= place[:, None] - place[None, :] < window

    def loss(q, k, v):
        k, v = (jnp.repeat(x, heads.queries // heads.keys, axis=2) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * heads.size**-0.5
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        result = jnp.einsum("bhqk,bkhd->bqhd", shares, v, precision="highest")
        return jnp.sum(result * weight), result

    exact = [x.astype(jnp.float32) for x in (q, k, v)]
    (_, result), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*exact)
    pairs = zip(results, (result, *gradients), strict=True)
    return jnp.stack([jnp.max(jnp.abs(have.astype(jnp.float32) - want)) / jnp.max(jnp.abs(want)) for have, want in pairs])


def document(length: int, packed: bool) -> jax.Array:
    """Return the document of each token, int32 [length]: one, or three of equal length."""
    return 1 + jnp.arange(length, dtype=jnp.int32) * 3 // length if packed else jnp.ones(length, jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def arrays(heads: Heads, rows: int, length: int, seed: int) -> tuple[jax.Array, ...]:
    """Return random queries, keys, values and the weight of the loss in bfloat16."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = [(rows, length, count, heads.size) for count in (heads.queries, heads.keys, heads.keys, heads.queries)]
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))


def measure(heads: Heads, rows: int, length: int, options: argparse.Namespace, packed: bool = False,
            window: int | None = None) -> dict[str, dict[str, float]]:
    """Return the results of each implementation by name: ms, error, tflops, and the seconds of the first run (compilation)."""
    shape, inputs = (rows, length), arrays(heads, rows, length, options.seed)
    segments = jnp.broadcast_to(document(length, packed), shape) if packed else None
    most = length if window is None else min(window, length)
    visible = most - most * (most - 1) / (2 * length)
    flops = 3 * 4 * rows * length * (visible / 3 if packed else visible) * heads.queries * heads.size
    found: dict[str, dict[str, float]] = {}
    for choice in ("auto", "plain"):
        config = decoder(heads, choice, "bfloat16", window)
        kind = kind_of_attention(config, one_device(), rows, length)
        if kind in found:
            continue
        run = step(config, kind, shape, segments)
        first, results = timed(lambda run=run: run(*inputs))
        few = jax.tree.map(lambda x: x[:2], (results, *inputs))
        error = float(jnp.max(errors(*few, heads=heads, window=window, packed=packed)))
        times = [timed(lambda run=run: run(*inputs))[0] for _ in range(WARM_UP + options.runs)]
        seconds = median(times[WARM_UP:])
        found[kind] = {"ms": 1e3 * seconds, "error": error, "tflops": flops / seconds / 1e12, "first_s": first}
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=at_least(2), default=16384, help="tokens of all rows")
    parser.add_argument("--lengths", type=at_least(2), nargs="+", default=[768], help="tokens of a row")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Llama-3.2-1B"])
    parser.add_argument("--runs", type=at_least(1), default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args(argv)
    results = []
    for name in options.models:
        for length in options.lengths:
            rows = max(1, options.tokens // length)
            for kind, changes in ROWS.items():
                kernels = measure(MODELS[name], rows, length, options, **changes)
                results.append({"model": name, "rows": rows, "length": length, "kind": kind, "kernels": kernels})
                progress(json.dumps(results[-1]))
    lines = ["| heads of | rows x tokens | kind | kernel | ms | TFLOP/s | error |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row['model']} | {row['rows']} x {row['length']} | {row['kind']} | {kernel} | {value['ms']:.2f} | "
        f"{value['tflops']:.1f} | {value['error']:.1e} |"
        for row in results for kernel, value in row["kernels"].items()
    ]
    return report(options, "attention", {"results": results}, lines)


if __name__ == "__main__":
    run_main(main)
