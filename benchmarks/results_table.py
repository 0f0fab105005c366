"""Markdown tables of finished runs, for the README: `python benchmarks/results_table.py runs/seed0 runs/seed1 ...`.

Each number is read from WORKDIR/summary.json and the stages' timing.jsonl; nothing is typed in.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jaxalign.tracking.measures import measure, model_title
from jaxalign.tracking.timing import read_timing

MEASURES = ("harmful", "helpful", "helpful_scary", "evasive", "courteous", "focused")


def percent(rate: dict) -> str:
    return f"{100 * rate['rate']:.1f}% ({rate['count']}/{rate['total']})"


def seconds(workdir: Path) -> float:
    """Wall-clock seconds of all phases of all stages."""
    return sum(total["seconds"] for path in workdir.glob("*/timing.jsonl") for total in read_timing(path).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workdirs", nargs="+", type=Path)
    titles = [measure(name).title.lower() for name in MEASURES]
    print("| run | seed | model | " + " | ".join(titles) + " | KL, nats | minutes |")
    print("|---|---|---|" + "---|" * (len(MEASURES) + 2))
    for workdir in parser.parse_args().workdirs:
        summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
        stages = json.loads((workdir / "config.json").read_text(encoding="utf-8"))["stages"]
        for model in summary["models"]:
            cells = [percent(summary["rates"][model][measure]) for measure in MEASURES]
            cells.append("" if model == "base" else f"{summary['kl'][model]:.2f}")
            cells.append(f"{seconds(workdir) / 60:.1f}" if model == summary["models"][-1] else "")
            print(f"| {workdir.name} | {summary['seed']} | {model_title(model, stages)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
