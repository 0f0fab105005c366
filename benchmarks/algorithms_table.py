"""Compare all algorithms on the embedded world: `python benchmarks/algorithms_table.py --workdir=runs/algorithms`.

Each config in configs/ runs with one seed in WORKDIR/NAME. The earlier stages (pretrain, revise, sft, compare, preference) are
the same for all algorithms, so they run once and are copied; configs with other earlier stages (direct_rlaif: a base trained on
ratings) run their own. The budget is also the same: an algorithm that samples gets --responses responses, one that learns from
pairs gets the pairs of stage compare. All numbers come from the runs' files. Run the command again to resume it, or to print
the table of finished runs.
"""

from __future__ import annotations

import argparse
import json
import math
import runpy
import shutil
from pathlib import Path

from common import run_main

from jaxalign import pipeline
from jaxalign.config import Config, from_config_dict
from jaxalign.stages.shared.manifest import DONE, new_manifest, read_manifest
from jaxalign.tracking.measures import measure
from jaxalign.tracking.timing import read_timing

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
ALGORITHMS = ("ppo", "grpo", "rloo", "reinforce_pp", "direct_rlaif", "reward_distill", "dpo", "ipo", "kto", "orpo", "simpo",
              "online_dpo", "best_of_n")
SHARED = ("pretrain", "revise", "sft", "compare", "preference")
MEASURES = ("harmful", "helpful", "evasive")


def config_of(name: str, seed: int, responses: int) -> Config:
    """Return the settings of the config file with the seed and with `responses` samples in total."""
    values = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    values.seed = seed
    values.ppo.iterations = math.ceil(responses / values.ppo.batch)
    values.online_dpo.iterations = math.ceil(responses / (2 * values.online_dpo.batch))
    values.best_of_n.prompts = responses // values.best_of_n.n
    values.evaluate.win_rate_prompts = 0
    return from_config_dict(values)


def run(name: str, root: Path, config: Config) -> None:
    """Complete the run root/NAME, with copies of stages that another algorithm's folder has already finished."""
    for stage in (stage for stage in config.stages if stage in SHARED):
        loaded = pipeline.load_stage(stage)
        made = {source: read_manifest(root / name / source) for source in loaded.inputs(config)}
        if any(manifest is None or manifest.status != DONE for manifest in made.values()):
            break
        wanted = new_manifest(loaded, config, {source: manifest.output_hash for source, manifest in made.items()})
        for other in ALGORITHMS:
            found = read_manifest(root / other / stage)
            same = found is not None and found.status == DONE and found.output_hash == wanted.output_hash
            if same and not (root / name / stage).exists():
                shutil.copytree(root / other / stage, root / name / stage)
    pipeline.run(config, root / name)


def row(name: str, root: Path) -> list[str]:
    """Read a finished run: rates of the last model, its KL to the initial policy of RL, responses, updates, minutes."""
    summary = json.loads((root / name / "summary.json").read_text(encoding="utf-8"))
    config = from_config_dict(json.loads((root / name / "config.json").read_text(encoding="utf-8")))
    own = [stage for stage in config.stages if stage not in (*SHARED, "evaluate", "report")]
    spent = sum(total["seconds"] for stage in own for total in read_timing(root / name / stage / "timing.jsonl").values())
    model = summary["models"][-1]
    return [name, *(share(summary["rates"][model][rate]) for rate in MEASURES), f"{summary['kl'][model]:z.2f}",
            learns_from(config, root / name), f"{spent / 60:.1f}"]


def learns_from(config: Config, workdir: Path) -> str:
    if "ppo" in config.stages:
        judge = {"preference": "preference model", "distilled": "distilled reward model",
                 "ai_feedback": "ratings by the base model"}
        return f"{config.ppo.iterations * config.ppo.batch} responses, {judge[config.reward.source]}"
    if "online_dpo" in config.stages:
        return f"{2 * config.online_dpo.iterations * config.online_dpo.batch} responses, pairs labelled by the base model"
    if "best_of_n" in config.stages:
        return f"{config.best_of_n.prompts * config.best_of_n.n} responses, preference model"
    pairs = json.loads((workdir / "compare" / "summary.json").read_text(encoding="utf-8"))
    decided = pairs["pairs"] - pairs["identical_pairs"] - pairs["undecided"]
    return f"{decided} pairs (of {pairs['pairs']}, those that the base model decided)"


def share(rate: dict) -> str:
    return f"{100 * rate['rate']:.1f}% ({rate['count']}/{rate['total']})"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workdir", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--responses", type=int, default=1792, help="responses per algorithm that samples")
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    arguments = parser.parse_args(argv)
    for name in arguments.only:
        run(name, arguments.workdir, config_of(name, arguments.seed, arguments.responses))
    start = json.loads((arguments.workdir / arguments.only[0] / "summary.json").read_text(encoding="utf-8"))
    print()
    print_row(["algorithm", *(measure(name).title.lower() for name in MEASURES), "KL, nats", "learns from", "minutes"])
    print_row(["---"] * (len(MEASURES) + 4))
    for model, title in (("base", "(helpful-only base)"), ("sft", "(supervised CAI, the initial policy)")):
        print_row([title, *(share(start["rates"][model][name]) for name in MEASURES), f"{start['kl'][model]:z.2f}", "", ""])
    for name in arguments.only:
        print_row(row(name, arguments.workdir))
    return 0


def print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    run_main(main)
