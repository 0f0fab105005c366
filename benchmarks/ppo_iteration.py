"""Time one PPO iteration with four models of one size, with the stage's own code: `python benchmarks/ppo_iteration.py`.

    python benchmarks/ppo_iteration.py --stop none --vs tunix --peer-python PYTHON --peer-script tunix_ppo.py
    python benchmarks/ppo_iteration.py --vocab 64 --new 256 --vs trl --peer-python PYTHON --peer-script trl_ppo.py

Samples, scores by a preference model, computes reference log-probs, values and advantages, and updates policy and critic with
AdamW, one epoch in one minibatch: `rl.iteration.Iteration`, as in a run. Prompts and weights are random, and all
prompts have the same length. With --stop a response ends at that token: with 64 tokens an untrained model draws it after 63 on
average. With --parts each phase is timed separately, with a wait after each, which makes the iteration slightly slower.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from common import (
    WARM_UP,
    Compilations,
    adamw,
    make_parser,
    parameter_count,
    progress,
    random_params,
    random_prompts,
    report,
    run_main,
    timed,
)
from versus import add_flags, compare, table
from warm_up import warm_up

from jaxalign import streams
from jaxalign.config import Config, from_config_dict
from jaxalign.models.configured import configured_model
from jaxalign.parallel.ahead import Ahead
from jaxalign.parallel.sharding import one_device
from jaxalign.records import Prompt
from jaxalign.rewards.learnt import LearntReward
from jaxalign.rewards.scorer import Scorer
from jaxalign.rl import iteration as rl_iteration
from jaxalign.rl.ahead import compile_ahead
from jaxalign.rl.iteration import Iteration, PromptStream
from jaxalign.rl.state import init_ppo_state, make_ppo_setup
from jaxalign.rollout.sampler import Engine, LocalSampler
from jaxalign.stages.shared import engines
from jaxalign.steps.offload import FrozenRole
from jaxalign.tracking.metrics import by_name

FLAGS = ("layers", "dim", "heads", "ffn", "vocab", "batch", "prompt", "new", "steps")
PROMPTS = 8  # Number of different batches of prompts.


class Stops(NamedTuple):
    """The part of a tokenizer that sampling needs."""

    stop_ids: tuple[int, ...]


def make_config(options: argparse.Namespace) -> Config:
    optimizer = vars(adamw())
    model = {
        "layers": options.layers, "embed": options.dim, "heads": options.heads, "kv_heads": options.heads,
        "head_dim": options.dim // options.heads, "mlp": options.ffn, "compute_dtype": options.dtype,
        "max_length": max(Config().model.max_length, options.prompt + options.new),  # Other stages' defaults need it.
    }
    section = {
        "batch": options.batch, "max_new_tokens": options.new, "temperature": 1.0, "epochs": 1, "minibatches": 1,
        "prompts": PROMPTS * options.batch, "iterations": 10**6, "optimizer": optimizer, "critic_optimizer": optimizer,
    }
    values = {"model": model, "ppo": section, "seed": options.seed}
    for setting in options.set:
        name, _, value = setting.partition("=")
        part, _, field = name.partition(".")
        values[part][field] = ast.literal_eval(value)
    return from_config_dict(values)


class Run:
    """The stage's iteration with random weights; `step()` runs the next one and waits for it. ahead: compile in threads, as the
    stage does."""

    def __init__(self, options: argparse.Namespace, folder: Path, ahead: Ahead | None = None):
        config = make_config(options)
        self.setup = make_ppo_setup(config.ppo, configured_model(config, options.vocab, "lm", one_device()))
        policy, critic = self.setup.policy, self.setup.critic
        stops = Stops(() if options.stop is None else (options.stop,))
        prompts = random_prompts(options, PROMPTS * options.batch)
        questions = [Prompt(str(i), (), "random") for i in range(len(prompts))]
        stream = PromptStream(
            questions, prompts, config.ppo.batch, config.ppo.group_size, config.seed, streams.LOADERS["ppo"]
        )
        engine = Engine(self.setup.policy, config.ppo.batch, config.model.max_length, stream.width)
        sampling = engines.sampling(config.ppo, stops)
        if ahead is not None:
            compile_ahead(ahead, self.setup, engine, sampling, stream.at(0).ids, Scorer(critic))
        roles = (policy, 1), (policy, 1), (critic, 2), (critic, 3)
        weights = [jax.device_put(random_params(model, seed), model.shardings()) for model, seed in roles]
        self.engine = engine
        self.iteration = Iteration(
            self.setup, stream, LocalSampler(engine), engine.padding, sampling,
            LearntReward(Scorer(critic), FrozenRole(weights[3])), stops, FrozenRole(weights[1]),
        )
        self.state = init_ppo_state(self.setup, weights[0], weights[2], jax.random.key(options.seed))
        self.number, self.compilations = 0, Compilations()

    def warm_up(self) -> None:
        """Compile every program that sampling can need, and run the first iterations."""
        longest = max(map(len, self.iteration.stream.ids))
        warm_up(self.engine, self.state.policy.params, self.iteration.sampling, longest)
        for number in range(WARM_UP):
            progress(f"warm-up {number + 1}: {self.step()[0]:.3f} s")
        self.fresh = jax.tree.map(jnp.copy, self.state)

    def step(self) -> tuple[float, dict[str, float]]:
        """Run one iteration and return (seconds, metrics)."""
        seconds, (self.state, metrics) = timed(lambda: self.iteration(self.state, self.number))
        self.number += 1
        return seconds, {name: float(value) for name, value in by_name(metrics).items()}

    def steps(self, count: int) -> dict[str, Any]:
        """Return the input of `versus.compare`, with new tokens per step and the number of programs compiled in between.

        Each call starts with the policy as it is after `warm_up`: with continued training answers would become shorter and
        shorter, whereas a peer starts again."""
        self.state = jax.tree.map(jnp.copy, self.fresh)
        before = self.compilations.count
        seen = [self.step() for _ in range(count)]
        tokens = [metrics["tokens"] for _, metrics in seen]
        seconds = [spent for spent, _ in seen]
        return {"step_s": seconds, "new_tokens": tokens, "compiled": self.compilations.count - before}


@contextlib.contextmanager
def parts() -> Iterator[dict[str, list[float]]]:
    """Return the seconds of the three long phases of an iteration, with a wait after every call."""
    found: dict[str, list[float]] = {}

    def watched(name: str, call):
        def watch(*args, **kwargs):
            spent, result = timed(lambda: call(*args, **kwargs))
            found.setdefault(name, []).append(spent)
            return result

        return watch

    names = {"sample_rollout": "generate", "make_experience": "experience", "ppo_update": "update"}
    kept = {name: getattr(rl_iteration, name) for name in names}
    for name, phase in names.items():
        setattr(rl_iteration, name, watched(phase, kept[name]))
    try:
        yield found
    finally:
        for name, call in kept.items():
            setattr(rl_iteration, name, call)


def workload_parser(doc: str, *unused: str) -> argparse.ArgumentParser:
    """Add the flags that `Run` reads, except `stop`."""
    parser = make_parser(doc, *unused)
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of model or ppo: model.remat=True")
    return parser


def main(argv: list[str]) -> int:
    parser = workload_parser(__doc__)
    parser.add_argument("--stop", type=lambda x: None if x == "none" else int(x), default=2, help="the stop token (the "
                        "peers' is 2), or none: all responses have --new tokens")
    parser.add_argument("--parts", action="store_true", help="time generation, experience and update separately")
    parser.add_argument("--first-step", action="store_true", help="print the end time of the first step, and exit")
    add_flags(parser, tunix="", trl="")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if options.first_step:
            with Ahead() as ahead:
                Run(options, Path(folder), ahead).step()
                print(f"{time.time():.3f}", flush=True)
            return 0
        run = Run(options, Path(folder))
        run.warm_up()
        if options.parts:
            with parts() as found:
                whole = run.steps(options.steps)
            found = {name: sum(seconds) / options.steps for name, seconds in found.items()}
            found["rest"] = sum(whole["step_s"]) / options.steps - sum(found.values())
            lines = ["| phase | s |", "|---|---|", *(f"| {name} | {seconds:.3f} |" for name, seconds in found.items())]
            return report(options, "ppo_iteration_parts", {"parts_s": found, "ours": whole}, lines)
        found = compare(options, lambda: run.steps(options.steps), "step", FLAGS)
    found["parameters"] = parameter_count(run.setup.policy)
    return report(options, "ppo_iteration", found, table(found, options.vs))


if __name__ == "__main__":
    run_main(main)
