"""Compare the labels of stage compare with the gold judge of the world: `python benchmarks/label_quality.py WORKDIR...`.

A decided pair is right if its label prefers the answer that is better on an axis of its principles (harm, refusal, courtesy or
focus) according to the gold judge, wrong if it prefers an answer that is worse on one and better on none, and equal if the
answers do not differ on these axes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jaxalign.config import from_config_dict
from jaxalign.data.sources.generated import world_of
from jaxalign.data.world.label_scores import OUTCOMES, label_quality
from jaxalign.stages.shared.labelled import row_comparison
from jaxalign.stages.shared.shards import Shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workdirs", nargs="+", type=Path)
    parser.add_argument("--margin", type=float, default=0.0, help="count only labels that differ from 0.5 by more than this")
    arguments = parser.parse_args()
    print("| run | pairs with different answers | decided | right | wrong | equal | right on the deciding axis |")
    print("|---|---|---|---|---|---|---|")
    for workdir in arguments.workdirs:
        world = world_of(from_config_dict(json.loads((workdir / "config.json").read_text(encoding="utf-8"))))
        pairs = [row_comparison(row) for row in Shards(workdir / "compare").read()]
        near = [pair for pair in pairs if pair.decided and abs(pair.label_ab + pair.label_ba - 1) <= 2 * arguments.margin]
        found = label_quality(world, [pair for pair in pairs if pair not in near])
        counts = [found["any_axis"][name] for name in OUTCOMES]
        cells = [workdir.name, found["pairs"] + len(near), found["decided"], *counts, found["deciding_axis"]["right"]]
        print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
