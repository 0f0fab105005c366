"""Time PPO with roles on two devices against PPO on one of them: `python benchmarks/placement.py`.

Two simulated CPU devices. The same iterations as in `ppo_iteration.py` run, in alternation,

- in turn: all roles on the first device, all threads on one core;
- scored apart: the reward model on the second device, so that reference and reward model score at the same time;
- ahead: sampling on the second device, one step ahead (`ppo.sample_ahead`), while the first scores and updates.

The last two use two cores, one per device. XLA's CPU client has one pool of threads for all devices, so a device may also use
the core of the other device while that one waits. Choose `--new` and `--batch` so that sampling takes about as long as scoring
and updating: then neither waits for long. If one waits, the measured time is below that of devices with one core each.

The table has the medians over blocks of `--steps` iterations. The last lines compare with `planner.schedules` from the times in
turn.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import contextlib
import dataclasses
import functools
import statistics
import tempfile
import time
from pathlib import Path

from common import report, run_main, timed
from ppo_iteration import Run, workload_parser

from jaxalign.planner.schedules import TaskTimes, flat, interleave, one_step_ahead
from jaxalign.rewards.learnt import LearntReward
from jaxalign.rewards.scorer import Scorer
from jaxalign.rl.iteration import Iteration
from jaxalign.rl.placed import PlacedIteration, RoleWeights
from jaxalign.rl.placing import place_roles, ppo_run
from jaxalign.rl.sampled_ahead import AheadRollouts
from jaxalign.rollout.sampler import Engine, LocalSampler
from jaxalign.steps.offload import FrozenRole

ALL_CORES = os.sched_getaffinity(0)
LAYOUTS = {
    "in turn": (),
    "scored apart": ("policy+critic+reference=0", "reward=1"),
    "ahead": ("policy+critic+reference+reward=0", "generator=1"),
}
CORES = {"in turn": 1, "scored apart": 2, "ahead": 2}


def use_cores(count: int) -> None:
    """Restricts all threads of this process to the first `count` cores."""
    cores = set(sorted(ALL_CORES)[:count])
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # A thread may end meanwhile.
            os.sched_setaffinity(int(thread), cores)


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


def passes(run: Run, steps: int) -> dict[str, float]:
    """Median seconds of the pass of each role, in turn on one device: "reference", "values" and "reward"."""
    place(run, ("policy+critic+reference+reward=0",), False)
    iteration, spent = run.iteration, {}

    def watch(name: str) -> None:
        call = getattr(iteration, name)

        def watched(*args):
            seconds, result = timed(lambda: call(*args))
            role = "reward" if name == "scored" else "reference" if args[0] == "reference" else "values"
            spent.setdefault(role, []).append(seconds)
            return result

        setattr(iteration, name, watched)

    watch("_run")
    watch("scored")
    for _ in range(steps + 2):
        run.step()
    return {role: statistics.median(seconds[2:]) for role, seconds in spent.items()}


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
            for name, layout in layouts.items():
                use_cores(CORES[name])
                layout.block(options.steps)
        use_cores(1)
        spent = passes(Run(options, Path(folder)), options.steps)
    return _report(options, layouts, spent)


def _report(options: argparse.Namespace, layouts: dict[str, Layout], spent: dict[str, float]) -> int:
    found = {
        name: {"step": statistics.median(layout.seconds)}
        | {phase: statistics.median(seconds) for phase, seconds in layout.phases.items()}
        for name, layout in layouts.items()
    }
    base, apart = found["in turn"], found["scored apart"]
    lines = ["| layout | s per iteration | generate | score | update | ratio |", "|---|---|---|---|---|---|"]
    for name, seconds in found.items():
        phases = " | ".join(f"{seconds[phase]:.3f}" for phase in ("generate", "score", "update"))
        lines.append(f"| {name} | {seconds['step']:.3f} | {phases} | {seconds['step'] / base['step']:.2f} |")
    lines.append("Passes in turn: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in spent.items()))
    value = spent.get("values", 0.0)
    rest = max(0.0, base["score"] - sum(spent.values()))
    times = TaskTimes(base["generate"], spent["reference"], (spent["reward"],), value, rest, base["update"])
    parts = [["reference", "value"] if value else ["reference"], ["reward 0"]]
    seconds = {
        "in turn": flat(times, 50).seconds_per_update,
        "scored apart": interleave(times, 50, parts).seconds_per_update,
        "ahead": one_step_ahead(times, 50, scoring="training").seconds_per_update,
    }
    score = max(spent["reference"] + value, spent["reward"]) + rest
    lines.append(f"Scoring apart takes {apart['score'] / base['score']:.2f} of the phase in turn; predicted "
                 f"{score / base['score']:.2f}.")
    for name in ("scored apart", "ahead"):
        measured, predicted = found[name]["step"], seconds[name]
        lines.append(f"An iteration {name}: {measured:.3f} s, {measured / base['step']:.2f} of the time in turn; predicted "
                     f"{predicted:.3f} s, {predicted / seconds['in turn']:.2f}.")
    return report(options, "placement", {"layouts": found, "passes": spent, "predicted_s": seconds}, lines)


if __name__ == "__main__":
    run_main(main)
