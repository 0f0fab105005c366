"""Compare the FLOP/s of PPO's update with those of its matrix products: `python benchmarks/update_rate.py`.

The update is `ppo_update` of a policy and a critic on --batch full rows of --prompt and --new tokens, within the stage's own
iteration. Its FLOPs are those that learning needs: three products for each weight and token, causal attention, and the LM head
at response tokens; AdamW, norms, softmax and recomputation count only as time. The products are those of the weights with all
tokens of a step, forward and backward, each jitted and timed separately; their rate is the sum of their FLOPs over the sum of
their times. Update and products alternate.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from common import at_least, median, progress, report, run_main, timed
from ppo_iteration import Run, parts, workload_parser


class Product(NamedTuple):
    """A product [m, k] x [k, n] that occurs `times` times per update. turned: the left factor is stored as [k, m], as in the
    gradient of a weight."""

    m: int
    k: int
    n: int
    times: int
    turned: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


def weight_products(tokens: int, inputs: int, outputs: int, times: int) -> list[Product]:
    """Return the forward product and those for the gradients of activations and weights."""
    return [
        Product(tokens, inputs, outputs, times), Product(tokens, outputs, inputs, times),
        Product(inputs, tokens, outputs, times, turned=True),
    ]


def update_products(options: argparse.Namespace) -> list[Product]:
    """Return the products of the weights of policy and critic, and of the policy's LM head."""
    D, F, tokens = options.dim, options.ffn, options.batch * (options.prompt + options.new)
    layers = 2 * options.layers
    return [
        *weight_products(tokens, D, D, 4 * layers), *weight_products(tokens, D, F, 2 * layers),
        *weight_products(tokens, F, D, layers), *weight_products(options.batch * options.new, D, options.vocab, 1),
    ]


def attention_flops(options: argparse.Namespace) -> int:
    """Return the FLOPs of causal attention of policy and critic: forward, and twice that backward."""
    T = options.prompt + options.new
    return 2 * options.layers * 3 * 4 * options.batch * (T * (T + 1) // 2) * options.dim


def product_seconds(product: Product, dtype: str, runs: int) -> float:
    """Return the median time of a jitted product."""
    left = jnp.ones((product.k, product.m) if product.turned else (product.m, product.k), dtype)
    right = jnp.ones((product.k, product.n), dtype)
    multiply = jax.jit(lambda a, b: jax.lax.dot_general(a, b, (((0 if product.turned else 1,), (0,)), ((), ()))))
    timed(lambda: multiply(left, right))
    return median([timed(lambda: multiply(left, right))[0] for _ in range(runs)])


def main(argv: list[str]) -> int:
    parser = workload_parser(__doc__)
    parser.add_argument("--pairs", type=at_least(1), default=5, help="rounds")
    parser.add_argument("--runs", type=at_least(1), default=5, help="runs of each product per round; the median counts")
    options = parser.parse_args(argv)
    options.stop = None
    products = update_products(options)
    flops = sum(product.flops * product.times for product in products)
    update_flops = flops + attention_flops(options)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        run = Run(options, Path(folder))
        run.warm_up()
        for _ in range(options.pairs):
            with parts() as found:
                run.steps(options.steps)
            update = median(found["update"])
            alone = sum(product.times * product_seconds(product, options.dtype, options.runs) for product in products)
            rates = {"update": update_flops / update, "products": flops / alone}
            ratio = rates["update"] / rates["products"]
            rounds.append({"update_s": update, "products_s": alone, "flops_s": rates, "ratio": ratio})
            progress(f"round {len(rounds)}: {rounds[-1]}")
    ratio = median([row["ratio"] for row in rounds])
    lines = ["| round | update, s | GFLOP/s | products, GFLOP/s | ratio |", "|---|---|---|---|---|"]
    for number, row in enumerate(rounds):
        rates = row["flops_s"]
        cells = f"{row['update_s']:.3f} | {rates['update'] / 1e9:.1f} | {rates['products'] / 1e9:.1f} | {row['ratio']:.3f}"
        lines.append(f"| {number + 1} | {cells} |")
    found = {"rounds": rounds, "ratio": ratio, "update_flops": update_flops}
    return report(options, "update_rate", found, [*lines, f"| median | | | | {ratio:.3f} |"])


if __name__ == "__main__":
    run_main(main)
