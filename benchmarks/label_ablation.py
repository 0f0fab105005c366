"""Switch each part of the labelling off and measure the labels: `python benchmarks/label_ablation.py WORKDIR... --out=DIR`.

WORKDIR is a finished default run of a seed. Its base model and supervised policy are kept; compare and preference run again
with each change of `LEVERS`. A change that only concerns how verdicts become labels (`DECISIONS`) reads the verdicts of the
finished run. Preference trains one model, not an ensemble, so that the table shows the labels. It has the labels that are right
by the gold judge of the world on an axis of the pair's principles, and the held-out accuracy of the preference model, over all
seeds together with 95% Wilson intervals, and the time of compare. If too few pairs are decided, preference ends with
an error: the seed then counts in the labels only, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxalign.algorithms.statistics import wilson_interval
from jaxalign.config import from_config_dict
from jaxalign.data.sources.generated import world_of
from jaxalign.data.world.label_scores import label_quality
from jaxalign.stages.shared.labelled import row_comparison
from jaxalign.stages.shared.shards import Shards

KEPT = ("pretrain", "revise", "sft")
DECISIONS = {f"feedback.{name}" for name in ("aggregate", "consistent", "undecided_margin", "correct_position", "undecided",
                                             "undecided_weight")}
"""Fields that change the labels of compare but not the requests to the judge."""
LEVERS: dict[str, dict[str, Any]] = {
    "default": {},
    "no tie": {"feedback.ties": False},
    "one principle": {"feedback.principles_per_comparison": 1},
    "all principles": {"feedback.principles_per_comparison": 8},
    "mean over principles": {"feedback.aggregate": "mean"},
    "contradictions kept": {"feedback.consistent": False},
    "margin 0.02, contradictions kept": {"feedback.consistent": False, "feedback.undecided_margin": 0.02},
    "position bias kept": {"feedback.correct_position": False},
    "second order always": {"feedback.second_order": "always"},
    "two answers": {"compare.samples": 2},
    "uncertain answers": {"compare.choose": "uncertain"},
    "three chains of thought": {"feedback.reasonings": 3, "feedback.reasoning_temperature": 0.7},
    "no reasoning": {"feedback.reasoning": False},
    "ties kept with weight 0.5": {"feedback.undecided": "half", "feedback.undecided_weight": 0.5},
    "early stopping": {"preference.early_stopping": True},
}
"""What the table calls a change, and the config fields that it sets."""


def copy_verdicts(source: Path, folder: Path, changes: Mapping[str, Any]) -> None:
    """Copies the rows of compare as an unfinished stage with `changes`, which then only decides the labels again."""
    shutil.copytree(source / "compare", folder / "compare")
    path = folder / "compare" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["status"] = "running"
    # Fields that compare does not read are not in its manifest.
    manifest["config"] |= {field: value for field, value in changes.items() if field in manifest["config"]}
    path.write_text(json.dumps(manifest), encoding="utf-8")


def run(source: Path, folder: Path, changes: Mapping[str, Any]) -> None:
    """Runs compare and preference in `folder` with the earlier stages of `source`; a finished folder is not run again.

    Raises:
      CalledProcessError: compare failed, or preference did for another reason than its data (exit code 2).
    """
    for stage in KEPT:
        if not (folder / stage).exists():
            shutil.copytree(source / stage, folder / stage)
    asked = {field: value for field, value in changes.items() if not field.startswith("preference.")}
    if asked.keys() <= DECISIONS and not (folder / "compare").exists():
        copy_verdicts(source, folder, asked)
    seed = json.loads((source / "config.json").read_text(encoding="utf-8"))["seed"]
    flags = [f"--config.{field}={value}" for field, value in changes.items()]
    stages = (*KEPT, "compare", "preference")
    command = [sys.executable, "-m", "jaxalign.train", f"--workdir={folder}", f"--config.seed={seed}",
               f"--config.stages={','.join(stages)}", "--config.preference.members=1", *flags]
    with open(folder / "log.txt", "a", encoding="utf-8") as log:
        done = subprocess.run(command, check=False, stdout=log, stderr=log)
    if done.returncode != 2 or not (folder / "compare" / "summary.json").exists():
        done.check_returncode()


def measure(folder: Path) -> dict[str, Any]:
    """The counts of one run: pairs, decided and right labels, held-out pairs and right predictions, seconds of compare.

    `stopped` is 1 if preference ended with an error.
    """
    world = world_of(from_config_dict(json.loads((folder / "config.json").read_text(encoding="utf-8"))))
    labels = label_quality(world, (row_comparison(row) for row in Shards(folder / "compare").read()))
    summary = folder / "preference" / "summary.json"
    held_out = (json.loads(summary.read_text(encoding="utf-8"))["held_out"] or {}) if summary.exists() else {}
    pairs = json.loads((folder / "compare" / "summary.json").read_text(encoding="utf-8"))["pairs"]
    timing = (json.loads(line) for line in open(folder / "compare" / "timing.jsonl", encoding="utf-8"))
    right = round(held_out.get("accuracy", 0) * held_out.get("pairs", 0))
    return {"pairs": pairs, "decided": labels["decided"], "right": labels["any_axis"]["right"],
            "held_out": held_out.get("pairs", 0), "predicted": right, "seconds": sum(row["seconds"] for row in timing),
            "stopped": int(not summary.exists())}


def share(count: int, total: int) -> str:
    """A share with its 95% interval, as a cell of the table."""
    if not total:
        return "-"
    low, high = wilson_interval(count, total)
    return f"{count / total:.1%} ({low:.1%} to {high:.1%}) of {total:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workdirs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--levers", nargs="*", default=list(LEVERS), choices=list(LEVERS), metavar="NAME")
    arguments = parser.parse_args()
    print("| change | decided | right by the gold judge | preference model, held out | compare, seconds per run |")
    print("|---|---|---|---|---|")
    for lever in arguments.levers:
        found = []
        for workdir in arguments.workdirs:
            folder = arguments.out / lever.replace(" ", "-").replace(",", "") / workdir.name
            folder.mkdir(parents=True, exist_ok=True)
            run(workdir, folder, LEVERS[lever])
            found.append(measure(folder))
        total = {name: sum(one[name] for one in found) for name in found[0]}
        held_out = share(total["predicted"], total["held_out"])
        if total["stopped"]:
            held_out += f"; preference stopped on {total['stopped']} of {len(found)} seeds"
        cells = [lever, f"{total['decided']:,} of {total['pairs']:,} ({total['decided'] / total['pairs']:.0%})",
                 share(total["right"], total["decided"]), held_out,
                 f"{total['seconds'] / len(found):.0f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
