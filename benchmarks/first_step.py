"""Measure the time to the first PPO step with an empty and with a filled compile cache: `python benchmarks/first_step.py`.

Each start is a separate process, timed from its spawn to the end of its first iteration (`ppo_iteration.py`, the stage's own
code with four models): interpreter and libraries, weights, compilation, the step-0 checks and the iteration. A round is a cold
start with a new cache folder and a warm start with the same folder. All programs are cached and compiled ahead in threads, as
in a run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import at_least, median, progress, report, run_main
from ppo_iteration import FLAGS, workload_parser

from jaxalign.errors import UserError

CHILD = Path(__file__).with_name("ppo_iteration.py")


def start(words: list[str], cache: str) -> float:
    """Return the seconds until the first step of a new process is done."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    began = time.time()
    done = subprocess.run(
        [sys.executable, str(CHILD), *words, "--first-step"], env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise UserError(f"{CHILD.name} {' '.join(words)} failed ({done.returncode}); see its output above")
    return float(done.stdout.splitlines()[-1]) - began


def main(argv: list[str]) -> int:
    parser = workload_parser(__doc__, "steps")
    parser.add_argument("--pairs", type=at_least(1), default=5, help="rounds")
    options = parser.parse_args(argv)
    words = [word for name in (*FLAGS[:-1], "dtype", "seed") for word in (f"--{name}", str(getattr(options, name)))]
    words += ["--stop", "none"] + (["--set", *options.set] if options.set else [])
    rounds = []
    for _ in range(options.pairs):
        with tempfile.TemporaryDirectory() as cache:
            row = {name: start(words, cache) for name in ("cold_s", "warm_s")}
        rounds.append(row | {"ratio": row["warm_s"] / row["cold_s"]})
        progress(f"round {len(rounds)}: {rounds[-1]}")
    found = {name: median([row[name] for row in rounds]) for name in ("cold_s", "warm_s", "ratio")}
    lines = ["| round | cold, s | warm, s | ratio |", "|---|---|---|---|"]
    for number, row in enumerate([*rounds, found]):
        title = str(number + 1) if number < len(rounds) else "median"
        lines.append(f"| {title} | {row['cold_s']:.2f} | {row['warm_s']:.2f} | {row['ratio']:.3f} |")
    return report(options, "first_step", {"rounds": rounds, **found}, lines)


if __name__ == "__main__":
    run_main(main)
