"""PPO iterations as the stage runs them, of the smallest models."""

from __future__ import annotations

from jaxalign.config import Config
from jaxalign.rewards.learnt import LearntReward
from jaxalign.rl.iteration import Iteration, PromptStream
from jaxalign.rl.sampled_ahead import AheadRollouts
from jaxalign.rollout.sampler import Engine, LocalSampler
from jaxalign.stages.shared import engines
from jaxalign.steps.offload import FrozenRole
from jaxalign.streams import LOADERS
from jaxalign.tracking.metrics import by_name
from tests import tiny
from tests.feedback.fakes import WordTokenizer, prompt


def sampled_by(setup, prompts):
    """Return (prompt stream, engine, sampling) as the stage builds them."""
    questions = [prompt(i) for i in range(len(prompts))]
    stream = PromptStream(questions, prompts, setup.config.batch, setup.config.group_size, 0, LOADERS["ppo"])
    engine = Engine(setup.policy, stream.batch, Config().model.max_length, stream.width)
    return stream, engine, engines.sampling(setup.config, WordTokenizer())


def iterate(steps=2, prompts=tiny.PROMPTS, offload=(), mesh=None, on_checks=None, first=0, **changes):
    """Return (last state, metrics of each step) of some iterations. With `first` above 0 the checks of iteration 0 are left
    out, which take longer to compile than an iteration."""
    setup = tiny.setup(mesh, epochs=1, minibatches=1, **changes)
    frozen = tiny.roles(setup)
    reward = LearntReward(tiny.scorer(setup), FrozenRole(frozen.preference, "frozen" in offload))
    reference = FrozenRole(frozen.reference, "frozen" in offload)
    stream, engine, sampling = sampled_by(setup, prompts)
    iteration = Iteration(
        setup, stream, LocalSampler(engine), engine.padding, sampling, reward, WordTokenizer(), reference,
        offload_optimizer="optimizer" in offload, on_checks=on_checks,
        ahead=AheadRollouts(None, 1) if setup.config.sample_ahead else None,
    )
    state, metrics = iteration.offload_optimizer_state(tiny.state(setup)), []
    for step in range(first, first + steps):
        state, row = iteration(state, step)
        metrics.append({name: float(value) for name, value in by_name(row).items()})
    iteration.monitor.settle()
    return state, metrics
