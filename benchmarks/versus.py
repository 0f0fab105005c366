"""Alternate jaxalign and a peer, both warm, and compute the ratio of each pair.

A peer is a script that runs under its own Python, in an empty folder, with the workload's flags. Its last line is a JSON object
with `step_s`, the seconds of its steps, of which the first ones do not count (`WARM_UP`); for comparisons per token, `tokens`
has the tokens of each step. jaxalign stays compiled in this process and waits while the peer runs. The order within a pair
alternates.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import WARM_UP, at_least, median, progress

from jaxalign.errors import UserError

PEERS = Path(__file__).with_name("peers")


def add_flags(parser: argparse.ArgumentParser, **scripts: str) -> None:
    """Add --vs, --peer-python, --peer-script and --pairs.

    scripts: the peers with their scripts in peers/; "" if --peer-script must provide it.
    """
    parser.add_argument("--vs", choices=tuple(scripts), help="alternate with this peer")
    parser.add_argument("--peer-python", type=Path, help="Python interpreter in which the peer is installed")
    parser.add_argument("--peer-script", type=Path, help="the peer's script, instead of the one in peers/")
    parser.add_argument("--peer-args", default="", help="additional flags of the peer, as one word")
    parser.add_argument("--pairs", type=at_least(1), default=5, help="number of pairs of runs")
    parser.set_defaults(scripts=scripts)


def cost(seen: dict[str, Any], per: str, warm_up: int = 0) -> float:
    """Return the seconds per unit of work: the median over steps, or total seconds over tokens or over steps."""
    seconds = seen["step_s"][warm_up:]
    if not seconds:
        raise UserError(f"a peer reported {len(seen['step_s'])} steps, but more than {warm_up} are needed; raise --steps")
    if per == "token":
        return sum(seconds) / sum(seen["tokens"][warm_up:])
    return median(seconds) if per == "step" else sum(seconds) / len(seconds)


def compare(
    options: argparse.Namespace, ours: Callable[[], dict[str, Any]], per: str, flags: Sequence[str], extra: Sequence[str] = (),
    warm_up: int = WARM_UP,
) -> dict[str, Any]:
    """Return {"per", "ours_s", "pairs"} and with a peer {"peer_s", "ratio"}: medians over the pairs.

    ours: runs the timed steps, warm, and returns the same record as a peer, without warm-up steps. per: "step" (the median
    step), "mean" (the mean of steps of different sizes) or "token". flags: the workload flags that the peer takes; extra: its
    other arguments. warm_up: number of the peer's steps that do not count; it runs that many additional steps.
    """
    command = _command(options, flags, extra, warm_up) if options.vs else None
    pairs = []
    for number in range(options.pairs):
        pair: dict[str, Any] = {}
        for side in ("ours", "peer") if number % 2 == 0 else ("peer", "ours"):
            if side == "ours":
                pair["ours"] = ours()
                pair["ours_s"] = cost(pair["ours"], per)
            elif command is not None:
                pair["peer"] = run_peer(command)
                pair["peer_s"] = cost(pair["peer"], per, warm_up)
        if command is not None:
            pair["ratio"] = pair["ours_s"] / pair["peer_s"]
        pairs.append(pair)
        progress("pair " + str(number + 1) + ": " + ", ".join(f"{k} {v:.4g}" for k, v in pair.items() if isinstance(v, float)))
    found: dict[str, Any] = {"per": per, "pairs": pairs}
    for name in ("ours_s", "peer_s", "ratio"):
        if name in pairs[0]:
            found[name] = median([pair[name] for pair in pairs])
    return found


def _command(options: argparse.Namespace, flags: Sequence[str], extra: Sequence[str], warm_up: int) -> list[str]:
    script = options.peer_script or (PEERS / options.scripts[options.vs] if options.scripts[options.vs] else None)
    if script is None or options.peer_python is None:
        raise UserError(f"--vs={options.vs} needs --peer-python, an interpreter in which it is installed, and --peer-script if "
                        "peers/ has no script for this benchmark")
    if not script.is_file():
        raise UserError(f"--peer-script {script} is not a file")
    values = {name: getattr(options, name) for name in flags}
    values["steps"] = options.steps + warm_up
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [str(options.peer_python.absolute()), str(script.resolve()), *words, *extra, *options.peer_args.split()]


def run_peer(command: Sequence[str]) -> dict[str, Any]:
    """Run a peer and parse its last line. Raises UserError, with the end of its output, if it failed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise UserError(f"the peer failed ({done.returncode}): {' '.join(command)}\n{(done.stderr or done.stdout)[-2000:]}")
    return json.loads(lines[-1])


def table(found: dict[str, Any], peer: str | None) -> list[str]:
    """Format one markdown line per pair, and the medians."""
    scale, unit = (1e6, "us a token") if found["per"] == "token" else (1.0, "s a step")
    names = ["ours_s"] + (["peer_s", "ratio"] if peer else [])
    heads = [f"ours, {unit}"] + ([f"{peer}, {unit}", "ratio"] if peer else [])

    def line(title: str, row: dict[str, Any]) -> str:
        return "| " + " | ".join([title, *(f"{row[name] * (scale if name != 'ratio' else 1):.4g}" for name in names)]) + " |"

    lines = ["| pair | " + " | ".join(heads) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [line(str(number + 1), pair) for number, pair in enumerate(found["pairs"])]
    return [*lines, line("median", found)]
