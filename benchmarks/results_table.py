"""Print Markdown tables of finished runs, for README.md and docs/results.md: `python benchmarks/results_table.py WORKDIR...`.

Numbers come from WORKDIR/summary.json and the stages' timing.jsonl.
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
    parser.add_argument("--minutes", action="store_true", help="add the wall-clock time of each run (on an idle machine)")
    arguments = parser.parse_args()
    for workdir in arguments.workdirs:
        if not (workdir / "summary.json").is_file():
            parser.error(f"{workdir} has no summary.json; give the work directory of a run whose stage evaluate is done")
    header = ["run", "model", *(measure(name).title.lower() for name in MEASURES), "KL, nats"]
    print_row(header + ["minutes"] * arguments.minutes)
    print_row(["---"] * (len(header) + arguments.minutes))
    for workdir in arguments.workdirs:
        summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
        stages = json.loads((workdir / "config.json").read_text(encoding="utf-8"))["stages"]
        for model in summary["models"]:
            first, last = model == summary["models"][0], model == summary["models"][-1]
            cells = [percent(summary["rates"][model][name]) for name in MEASURES]
            cells.append("" if first else f"{summary['kl'][model]:z.2f}")
            minutes = [f"{seconds(workdir) / 60:.1f}" if last else ""] * arguments.minutes
            print_row([workdir.name if first else "", model_title(model, stages), *cells, *minutes])


def print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
