"""Times `gae` against the same recurrence as a reversed Python loop over T: `python benchmarks/advantages_scan.py`.

Other libraries commonly loop from the last token to the first, with a few array operations over one column per iteration, each
dispatched separately, and stack the columns at the end. This loop is timed on NumPy, which has the lowest dispatch overhead,
and on eager JAX; `gae` is jitted, with its arrays on the device. The contenders alternate, so that other load affects all of
them equally; compilation is not counted. The output has medians and the ratio of loop to scan: a markdown table, or an object
with --json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from common import at_least, make_parser, report, run_main

from jaxalign.algorithms.advantages import gae

GAMMA, LAM = 1.0, 0.95


def reversed_loop(xp, rewards, values, mask):
    """Compute GAE over right-padded tokens with the array module `xp` (numpy or jax.numpy)."""
    advantage, columns = xp.zeros(rewards.shape[0], rewards.dtype), []
    for t in reversed(range(rewards.shape[1])):
        ahead = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
        advantage = mask[:, t] * (rewards[:, t] + GAMMA * ahead - values[:, t] + GAMMA * LAM * advantage)
        columns.append(advantage)
    advantages = xp.stack(columns[::-1], axis=1)
    return advantages, (advantages + values) * mask


def batch(rows: int, length: int, seed: int) -> tuple[np.ndarray, ...]:
    """Draw responses of random lengths: (rewards, values, mask), float32 [B, T], 0 at padding."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(length)[None, :] < rng.integers(1, length + 1, rows)[:, None]).astype(np.float32)
    rewards, values = rng.normal(size=(2, rows, length)).astype(np.float32) * mask
    return rewards, values, mask


def milliseconds(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each function, run in alternation."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(seen) for name, seen in times.items()}


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__, "layers", "dim", "heads", "ffn", "vocab", "prompt", "steps", "dtype")
    parser.add_argument("--batch", type=at_least(1), nargs="+", default=[64, 512], help="rows; one table line per size")
    parser.add_argument("--new", "--length", type=at_least(1), nargs="+", default=[64, 256, 1024],
                        help="tokens; one table line per size")
    parser.add_argument("--rounds", type=at_least(1), default=30, help="runs of each contender")
    options = parser.parse_args(argv)
    scan, found = jax.jit(gae), []
    lines = [
        "| B | T | scan, ms | loop on NumPy, ms | over scan | loop on eager JAX, ms | over scan |",
        "|---|---|---|---|---|---|---|",
    ]
    for rows in options.batch:
        for length in options.new:
            host = batch(rows, length, options.seed)
            device = jax.device_put(host)
            contenders = {
                "scan": lambda device=device: scan(*device, GAMMA, LAM),
                "numpy": lambda host=host: reversed_loop(np, *host),
                "eager": lambda device=device: reversed_loop(jnp, *device),
            }
            results = [run() for run in contenders.values()]  # compiles, and checks that all results agree
            for result in results[1:]:
                np.testing.assert_allclose(result[0], results[0][0], rtol=1e-3, atol=1e-3)
            took = milliseconds(contenders, options.rounds)
            found.append({"batch": rows, "new": length} | {f"{name}_ms": value for name, value in took.items()})
            loops = (f"{took[name]:.2f} | {took[name] / took['scan']:.1f}" for name in ("numpy", "eager"))
            lines.append(f"| {rows} | {length} | {took['scan']:.3f} | " + " | ".join(loops) + " |")
    return report(options, "advantages_scan", {"rows": found}, lines)


if __name__ == "__main__":
    run_main(main)
