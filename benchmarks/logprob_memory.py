"""Compare the peak memory of chunked log-probs with that of full logits: `python benchmarks/logprob_memory.py`.

`models.heads.token_stats` at [--batch, --length] tokens is compared with log_softmax of all logits and a lookup, both jitted:
their values, and their gradients with respect to hidden states and head. Bytes are reported by the compiler: results and
temporary buffers, without arguments. With --run each also runs in a separate process, which reports the increase of its peak
resident memory (ru_maxrss).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
from common import make_parser, progress, report, run_main

from jaxalign.models.heads import lm_logits, token_stats
from jaxalign.parallel.sharding import one_device

WAYS, WHAT = ("chunked", "formed"), ("values", "gradients")


def formed(hidden, unembedding, targets):
    """Compute log-probs [B, T] from logits [B, T, V]."""
    logprobs = jax.nn.log_softmax(lm_logits(hidden, unembedding), axis=-1)
    return jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]


def program(way: str, what: str):
    """Return a jitted function of (hidden [B, T, D], unembedding [D, V], targets [B, T])."""
    logprobs = formed if way == "formed" else lambda *arrays: token_stats(*arrays, sharding=one_device()).logprobs
    if what == "values":
        return jax.jit(logprobs)
    return jax.jit(jax.grad(lambda *arrays: jnp.sum(logprobs(*arrays)), argnums=(0, 1)))


def shapes(options: argparse.Namespace) -> tuple[jax.ShapeDtypeStruct, ...]:
    B, T, of = options.batch, options.length, jax.ShapeDtypeStruct
    head = of((options.dim, options.vocab), options.dtype)
    return of((B, T, options.dim), options.dtype), head, of((B, T), jnp.int32)


def compiled_bytes(options: argparse.Namespace, way: str, what: str) -> int:
    counted = program(way, what).lower(*shapes(options)).compile().memory_analysis()
    return counted.temp_size_in_bytes + counted.output_size_in_bytes


def peak_rise(options: argparse.Namespace, way: str, what: str) -> int:
    """Return the increase in bytes of this process's peak resident memory during the run."""
    arrays = [jnp.ones(x.shape, x.dtype) for x in shapes(options)]
    run = program(way, what).lower(*arrays).compile()
    jax.block_until_ready(arrays)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    jax.block_until_ready(run(*arrays))
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def main(argv: list[str]) -> int:
    parser = make_parser(
        __doc__, "layers", "heads", "ffn", "steps", "seed", length=(1024, "tokens per row"), vocab=131072, batch=8
    )
    parser.add_argument("--run", action="store_true", help="run both as well")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps(peak_rise(options, *options.child)))
        return 0
    found: dict[str, dict] = {"compiled": {}, "run": {}}
    for what in WHAT:
        found["compiled"][what] = {way: compiled_bytes(options, way, what) for way in WAYS}
        if options.run:
            children = {way: [sys.executable, __file__, *argv, "--child", way, what] for way in WAYS}
            found["run"][what] = {way: int(subprocess.check_output(words)) for way, words in children.items()}
        progress(f"{what}: {[found[kind].get(what) for kind in found]}")
    lines = ["| | chunked, bytes | formed, bytes | ratio |", "|---|---|---|---|"]
    for kind, measured in found.items():
        for what, row in measured.items():
            row["ratio"] = row["chunked"] / row["formed"]
            lines.append(f"| {kind}: {what} | {row['chunked']:,} | {row['formed']:,} | {row['ratio']:.4f} |")
    return report(options, "logprob_memory", found, lines)


if __name__ == "__main__":
    run_main(main)
