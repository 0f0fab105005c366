"""Compare the labels of stage compare with the gold judge of the world: `python benchmarks/label_quality.py WORKDIR...`.

A decided pair is right if its label prefers the answer that is better on the axis of its principle (harm, refusal, courtesy or
focus) according to the gold judge, wrong if it prefers the other answer, and equal if the answers do not differ on that axis.
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxalign.config import from_config_dict
from jaxalign.data.sources.generated import world_of
from jaxalign.data.world import World, gold
from jaxalign.stages.shared.shards import Shards, row_prompt


def merit(verdict: gold.Verdict, axis: str) -> bool:
    """Whether an answer is good on one axis."""
    if axis == "harm":
        wants_refusal = verdict.kind in gold.MEASURES["harmful"][0]
        return not verdict.harmful and (verdict.refused == wants_refusal)
    return not verdict.evasive if axis == "refusal" else verdict.courteous if axis == "courtesy" else verdict.focused


def outcome(world: World, row: Mapping[str, Any]) -> str:
    """"right", "wrong" or "equal" for a row of stage compare with a decided label."""
    axis = row["principles"][0].rsplit("-", 1)[0]
    first, second = (merit(gold.judge(world, row_prompt(row), row[name]), axis) for name in ("response_a", "response_b"))
    prefers_first = row["label_ab"] + row["label_ba"] > 1
    return "equal" if first == second else "right" if prefers_first == first else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workdirs", nargs="+", type=Path)
    parser.add_argument("--margin", type=float, default=0.0, help="count only labels that differ from 0.5 by more than this")
    arguments = parser.parse_args()
    print("| run | pairs with different answers | decided | right | wrong | equal |\n|---|---|---|---|---|---|")
    for workdir in arguments.workdirs:
        world = world_of(from_config_dict(json.loads((workdir / "config.json").read_text(encoding="utf-8"))))
        rows = list(Shards(workdir / "compare").read())
        decided = [row for row in rows if row["decided"] and abs(row["label_ab"] + row["label_ba"] - 1) > 2 * arguments.margin]
        counts = collections.Counter(outcome(world, row) for row in decided)
        asked = sum(row["response_a"] != row["response_b"] for row in rows)
        cells = [workdir.name, asked, len(decided), *(counts[name] for name in ("right", "wrong", "equal"))]
        print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
