"""Compare the bits of repeated training runs: `python benchmarks/repeat.py`.

Two processes train the same model by PPO from the same seed: `ppo_iteration.Run`, the stage's own iteration. The result is the
number of parameters of policy and critic that differ after --steps iterations, and the largest difference. Each setting of
--settings is tried with two processes of its own: "default", and "deterministic", which adds an option of XLA for GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from common import progress, report, run_main
from ppo_iteration import Run, workload_parser

from jaxalign.errors import UserError

SETTINGS = {"default": "", "deterministic": "--xla_gpu_deterministic_ops=true"}
"""XLA options by setting."""
RUNS = 2


def train(options, path: Path) -> None:
    """Run the iterations and write all parameters to an .npz file."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(options, Path(folder))
        for _ in range(options.steps):
            run.step()
    state = {"policy": run.state.policy.params, "critic": run.state.critic.params}
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(state))
    np.savez(path, **{jax.tree_util.keystr(key): leaf for key, leaf in leaves})


def compare(paths: list[Path]) -> dict[str, float]:
    """Return the number of parameters, of those that differ, and the largest difference."""
    first, second = (np.load(path) for path in paths)
    total = differing = 0
    largest = 0.0
    for name in first.files:
        one, other = first[name], second[name]
        total += one.size
        differing += int((one != other).sum())
        largest = float(np.maximum(largest, np.abs(one - other).max()))  # NaN stays.
    return {"parameters": total, "differing": differing, "largest": largest}


def compare_runs(setting: str, argv: list[str], folder: Path) -> dict[str, float] | None:
    """Return the comparison of two runs with a setting; None if one of them failed."""
    paths = [folder / f"{setting}-{number}.npz" for number in range(RUNS)]
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {SETTINGS[setting]}".strip()}
    # At the same time, without reserving the device's memory.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # Each compiles for itself: XLA's choice of kernels may differ.
    children = [subprocess.Popen([sys.executable, __file__, *argv, "--child", str(path)], stdout=subprocess.DEVNULL,
                                 env=environment | {"JAX_COMPILATION_CACHE_DIR": f"{path}-cache"}) for path in paths]
    return None if any([child.wait() for child in children]) else compare(paths)


def main(argv: list[str]) -> int:
    parser = workload_parser(__doc__)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--child", type=Path, help="train once and write the parameters to this file")
    options = parser.parse_args(argv)
    options.stop = None
    if options.child is not None:
        train(options, options.child)
        return 0
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for setting in options.settings:
            results[setting] = compare_runs(setting, argv, Path(folder))
            progress(f"{setting}: {json.dumps(results[setting])}")
    if not any(results.values()):
        raise UserError("every training process failed; its error is above")
    lines = ["| setting | parameters | differing | largest difference |", "|---|---|---|---|"]
    lines += [
        f"| {name} | failed | | |" if row is None else
        f"| {name} | {row['parameters']} | {row['differing']} | {row['largest']:.1e} |" for name, row in results.items()
    ]
    return report(options, "repeat", {"results": results}, lines)


if __name__ == "__main__":
    run_main(main)
