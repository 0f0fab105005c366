"""Measure the idle share of a pipeline from the time of a training step by micro-batches, against (S-1) / (R M + S-1).

    XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu python benchmarks/pipeline_bubble.py [--json]

Loss and gradients of a decoder over S stages on S devices, with R blocks of layers per stage and M micro-batches of equal size.
An idle stage computes results that are discarded, so with all devices on the same cores, the idle share of a pod's time appears
as a share of processor time. The processor time of a step is fitted as a + b (R M + S - 1), by least squares over M; the bubble
is then 1 - (a + b R M) / (a + b (R M + S - 1)). Times are medians of the process time, measured in alternation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from common import run_main

from jaxalign.config import Mesh
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.model import Model
from jaxalign.parallel.pipeline import bubble
from jaxalign.parallel.sharding import make_sharding

DECODER = DecoderConfig(vocab=512, layers=8, embed=192, heads=4, kv_heads=4, head_dim=48, mlp=768)
ROWS, LENGTH = 1, 128


def make_step(stages: int, repeats: int, parts: int):
    model = Model(DECODER, sharding=make_sharding(
        Mesh(pipeline=stages, pipeline_repeats=repeats, pipeline_micro_batches=parts)
    ))
    params = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (ROWS * parts, LENGTH), 0, DECODER.vocab)
    step = jax.jit(jax.value_and_grad(lambda params, tokens: jnp.mean(jnp.square(model.hidden(params, tokens)))))

    def run() -> object:
        return jax.block_until_ready(step(params, tokens))

    run()
    return run


def measure(stages: int, repeats: int, all_parts: list[int], runs: int) -> list[dict]:
    steps = {parts: make_step(stages, repeats, parts) for parts in all_parts}
    times: dict[int, list[float]] = {parts: [] for parts in all_parts}
    for _ in range(runs):
        for parts, step in steps.items():
            began = time.process_time()
            step()
            times[parts].append(time.process_time() - began)
    medians = {parts: statistics.median(found) for parts, found in times.items()}
    slots = [repeats * parts + stages - 1 for parts in all_parts]
    b, a = np.polyfit(slots, [medians[parts] for parts in all_parts], 1)
    return [
        {"stages": stages, "repeats": repeats, "micro_batches": parts, "seconds": round(medians[parts], 3),
         "measured": round(1 - (a + b * repeats * parts) / medians[parts], 3),
         "formula": round(bubble(stages, parts, repeats), 3)}
        for parts in all_parts
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", default="4,8,16,32")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    parts = [int(x) for x in args.micro_batches.split(",")]
    rows = [row for repeats in (1, 2) for row in measure(args.stages, repeats, parts, args.runs)]
    if args.json:
        print(json.dumps({"args": vars(args), "rows": rows}))
        return 0
    print("| stages | repeats | micro-batches | seconds | bubble measured | (S-1)/(RM+S-1) |\n|---|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    return 0


if __name__ == "__main__":
    run_main(main)
