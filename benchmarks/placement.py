"""Time PPO with roles on two devices of their own against PPO on one of them: `python benchmarks/placement.py`.

Two simulated CPU devices compute with one thread each, so each has at most one core. The same iterations as in
`ppo_iteration.py` run, in alternation,

- in turn: all roles on the first device;
- scored apart: the reward model on the second device, so that reference and reward model score at the same time;
- ahead: sampling on the second device, one step ahead (`ppo.sample_ahead`), while the first scores and updates.

The table has the medians over blocks of `--steps` iterations. Choose `--new` and `--batch` so that sampling takes about as long
as scoring and updating: then sampling ahead can halve the time. The last line compares with `planner.schedules` from the times
in turn.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import dataclasses
import functools
import statistics
import tempfile
import time
from pathlib import Path

from common import report, run_main
from ppo_iteration import Run, workload_parser

from jaxalign.planner.schedules import IterationTimes, flat, one_step_ahead
from jaxalign.rewards.learnt import LearntReward
from jaxalign.rewards.scorer import Scorer
from jaxalign.rl.iteration import Iteration
from jaxalign.rl.placed import PlacedIteration, RoleWeights
from jaxalign.rl.placing import place_roles, ppo_run
from jaxalign.rl.sampled_ahead import AheadRollouts
from jaxalign.rollout.sampler import Engine, LocalSampler
from jaxalign.steps.offload import FrozenRole

LAYOUTS = {
    "in turn": (),
    "scored apart": ("policy+critic+reference=0", "reward=1"),
    "ahead": ("policy+critic+reference+reward=0", "generator=1"),
}


def place(run: Run, entries: tuple[str, ...], ahead: bool) -> None:
    """Replaces the iteration of a run by one whose roles are placed."""
    given, setup = run.iteration, run.setup
    scorer = given.reward.scorer
    _, shardings = place_roles(ppo_run(setup.config, setup.policy, True, scorer.model), "custom", entries)
    weights = RoleWeights(shardings, None)
    engine = run.engine
    engine = Engine(setup.policy.on(weights.sharding("generator")), engine.batch, engine.max_length, engine.bucket)
    with given.reference.on_device() as reference, given.reward.role.on_device() as preference:
        reward = LearntReward(
            Scorer(scorer.model.on(weights.sharding("reward"))), FrozenRole(weights.on("reward", preference))
        )
        reference = FrozenRole(weights.on("reference", reference))
    make = functools.partial(PlacedIteration, weights=weights)
    run.engine = engine
    run.iteration = make(
        setup, given.stream, LocalSampler(engine), given.padding, given.sampling, reward, given.tokenizer, reference,
        ahead=AheadRollouts(None, 1) if ahead else None,
    )


@dataclasses.dataclass
class Layout:
    """A run and the times of its blocks: seconds per iteration, and by phase."""

    run: Run
    seconds: list[float] = dataclasses.field(default_factory=list)
    phases: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def block(self, steps: int) -> None:
        """Runs and times some iterations."""
        timeline: Iteration = self.run.iteration.timeline
        timeline.clear()
        began = time.perf_counter()
        for _ in range(steps):
            self.run.step()
        self.seconds.append((time.perf_counter() - began) / steps)
        for name, (spent, _) in timeline._sums.items():
            self.phases.setdefault(name, []).append(spent / steps)


def main(argv: list[str]) -> int:
    parser = workload_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=5, help="blocks of --steps iterations for each layout, in alternation")
    options = parser.parse_args(argv)
    options.stop = None
    with tempfile.TemporaryDirectory() as folder:
        layouts = {}
        for name, entries in LAYOUTS.items():
            run = Run(options, Path(folder))
            if entries:
                place(run, entries, name == "ahead")
            for _ in range(3):
                run.step()
            layouts[name] = Layout(run)
        for _ in range(options.blocks):
            for layout in layouts.values():
                layout.block(options.steps)
    return _report(options, layouts)


def _report(options: argparse.Namespace, layouts: dict[str, Layout]) -> int:
    found = {
        name: {"step": statistics.median(layout.seconds)}
        | {phase: statistics.median(spent) for phase, spent in layout.phases.items()}
        for name, layout in layouts.items()
    }
    base, ahead = found["in turn"], found["ahead"]
    lines = ["| layout | s per iteration | generate | score | update | ratio |", "|---|---|---|---|---|---|"]
    for name, times in found.items():
        phases = " | ".join(f"{times[phase]:.3f}" for phase in ("generate", "score", "update"))
        lines.append(f"| {name} | {times['step']:.3f} | {phases} | {times['step'] / base['step']:.2f} |")
    lines.append(f"Scoring apart takes {found['scored apart']['score'] / base['score']:.2f} of the time in turn.")
    times = IterationTimes(generate=base["generate"], reference=base["score"], policy_update=base["update"])
    predicted = one_step_ahead(times, 50, scoring="training").seconds_per_update / flat(times, 50).seconds_per_update
    lines.append(f"One step ahead: {ahead['step'] / base['step']:.2f} of the time in turn; predicted {predicted:.2f}.")
    return report(options, "placement", {"layouts": found, "predicted_ahead": predicted}, lines)


if __name__ == "__main__":
    run_main(main)
