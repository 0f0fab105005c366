"""Roles on meshes of their own: the tokens and losses of one mesh, for every strategy."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import types
from typing import Any

import jax
import numpy as np
import pytest

from jaxalign.config import PPOConfig
from jaxalign.errors import UserError
from jaxalign.records import Rollout
from jaxalign.rewards.learnt import LearntReward
from jaxalign.rl.iteration import Iteration
from jaxalign.rl.placed import PlacedIteration, RoleWeights
from jaxalign.rl.placing import check_options, place_roles, ppo_run
from jaxalign.rl.program_times import recorded_in, unrecorded
from jaxalign.rl.state import init_ppo_state, with_value_head
from jaxalign.rollout.sampler import Engine, LocalSampler
from jaxalign.steps.offload import FrozenRole
from jaxalign.tracking.device_times import FILE, busy_seconds, read_device_times
from jaxalign.tracking.metrics import by_name
from jaxalign.tracking.timing import Timeline
from tests import ppo_iterations, tiny
from tests.feedback.fakes import WordTokenizer

pytestmark = [pytest.mark.mesh, pytest.mark.usefixtures("few_sampling_programs")]

CUSTOM = ("policy=0-3:fsdp=4", "critic=4-5:data=2", "reference=4-5", "reward=6-7:tensor=2", "generator=6-7:tensor=2",
          "value=4-5")
NARROW = ("policy+reference=0-1:tensor=2", "generator=4-7:data=2,tensor=2", "reward=2-3")
PLACES = {
    "interleave": ("interleave", (), (2, 2, 2)), "separate": ("separate", (), (2, 1, 2)),
    "custom": ("custom", CUSTOM, (1, 4, 1)), "narrow": ("custom", NARROW, (1, 1, 2)),
}


def iterate(place, iterations=(1, 2), checks=None, directory=None, **changes):
    """(the last state, metrics and tokens of each iteration, the devices of each role) under a placement; None: one mesh.
    Iteration 0 also compiles and runs the checks of step 0, so the others start at 1."""
    strategy, entries, mesh = PLACES[place] if place else ("", (), None)
    setup = tiny.setup(mesh, **changes)
    frozen = tiny.roles(setup)
    scorer = tiny.scorer(setup)
    stream, engine, sampling = ppo_iterations.sampled_by(setup, tiny.PROMPTS)
    reference, preference, make, shardings = frozen.reference, frozen.preference, Iteration, {}
    if place:
        _, shardings = place_roles(ppo_run(setup.config, setup.policy, True, scorer.model), strategy, entries)
        if setup.owns_critic:
            setup = dataclasses.replace(setup, critic=setup.critic.on(shardings["critic"]))
        weights = RoleWeights(shardings, None)
        make = functools.partial(PlacedIteration, weights=weights, times=recorded_in(directory, shardings))
        engine = Engine(setup.policy.on(weights.sharding("generator")), engine.batch, engine.max_length, engine.bucket)
        scorer = dataclasses.replace(scorer, model=scorer.model.on(shardings["reward"]))
        reference, preference = weights.on("reference", reference), weights.on("reward", preference)
    iteration = make(
        setup, stream, LocalSampler(engine), engine.padding, sampling, LearntReward(scorer, FrozenRole(preference)),
        WordTokenizer(), FrozenRole(reference), on_checks=checks,
    )
    policy = with_value_head(setup, tiny.place(setup.reference, tiny.host_params()))
    critic = tiny.place(setup.critic, tiny.host_params("scalar", seed=3)) if setup.owns_critic else None
    state, metrics, tokens = init_ppo_state(setup, policy, critic, jax.random.key(11)), [], []
    place_rows = iteration.sample

    def sample(*args):
        rollout = place_rows(*args)
        tokens.append(np.asarray(rollout.tokens))
        return rollout

    iteration.sample = sample
    for step in iterations:
        state, row = iteration(state, step)
        metrics.append({name: float(value) for name, value in by_name(row).items()})
    iteration.monitor.settle()
    return state, metrics, tokens, shardings


# tests/trainers/test_ppo_placement.py has a run without a critic.
VARIANTS = {
    "once": {"epochs": 1, "minibatches": 1, "kl_in": "loss", "kl_estimator": "k3"},
    "stopped": {"target_kl": 1e-4, "sampler_correction": "truncate"},
    "shared": {"critic": "shared", "kl_in": "loss", "kl_estimator": "full"},
}
CASES = [("separate", "once"), ("custom", "stopped"), ("interleave", "stopped"), ("narrow", "shared")]


@functools.cache
def expected(variant):
    return iterate(None, **VARIANTS[variant])


@dataclasses.dataclass(frozen=True)
class Placed:
    """What a run under a placement leaves."""

    state: Any
    metrics: list
    tokens: list
    shardings: dict
    directory: pathlib.Path


@pytest.fixture(scope="module")
def placed(tmp_path_factory):
    """A function of (placement, variant) that runs it once."""

    @functools.cache
    def run(place, variant):
        directory = tmp_path_factory.mktemp(place)
        return Placed(*iterate(place, directory=directory, **VARIANTS[variant]), directory)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("place", "variant"), CASES)
def test_pitfall_30_every_placement_gives_the_tokens_and_the_metrics_of_one_device(place, variant, placed):
    run = placed(place, variant)
    _, wanted, wanted_tokens, _ = expected(variant)
    for found, want in zip(run.tokens, wanted_tokens, strict=True):
        np.testing.assert_array_equal(found, want)
    for found, want in zip(run.metrics, wanted, strict=True):
        assert found.keys() == want.keys()
        for name in want:
            assert found[name] == pytest.approx(want[name], rel=2e-3, abs=2e-5), name


def test_the_full_kl_needs_a_program_with_policy_and_reference():
    shardings = {"policy": tiny.setup((1, 4, 1)).policy.sharding, "reference": tiny.setup((1, 2, 1)).policy.sharding}
    same = shardings | {"reference": shardings["policy"]}
    check_options(PPOConfig(kl_estimator="full", kl_in="loss"), same)
    check_options(PPOConfig(kl_in="reward"), shardings)
    with pytest.raises(UserError, match="different meshes"):
        check_options(PPOConfig(kl_estimator="full", kl_in="loss"), shardings)
    with pytest.raises(UserError, match="set kl_in to 'loss'"):
        check_options(PPOConfig(kl_estimator="full", kl_in="reward"), same)


@pytest.mark.slow
def test_the_trained_models_stay_on_their_own_devices(placed):
    run = placed("custom", "stopped")
    for model, role in ((run.state.policy, "policy"), (run.state.critic, "critic")):
        devices = set(run.shardings[role].mesh.devices.flat)
        assert all(x.devices() == devices for x in jax.tree.leaves((model.params, model.opt_state)))
    assert run.state.kl_coef.devices() == set(run.shardings["policy"].mesh.devices.flat)


def test_responses_that_are_sampled_ahead_in_a_thread_are_counted():
    """The phase "generate" has the tokens of the responses, and FLOPs."""
    setup = tiny.setup(sample_ahead=True)
    counts = np.asarray([3, 1, 4, 1, 5, 8, 2, 6], np.int32)
    rollout = Rollout(np.zeros((8, 16), np.int32), np.full(8, 4, np.int32), counts, np.zeros((8, 8), np.float32), counts < 8)
    iteration = object.__new__(PlacedIteration)
    iteration.setup, iteration.timeline, iteration.sampling, iteration.program = setup, Timeline(), None, unrecorded
    iteration.ahead, iteration.stream = object(), types.SimpleNamespace(at=lambda step: step)
    iteration._weights = types.SimpleNamespace(roles=("policy", "generator"), meets=lambda first, second: False)
    iteration.update_sampler, iteration.respond = lambda params, version: None, lambda batch, key, sampling: rollout
    iteration._key = lambda state, step: None
    assert iteration.begin_next({}, None, 0, scored=False)() is rollout
    _, phase = iteration.timeline._sums["generate"]
    assert phase.tokens == counts.sum() == 30 and phase.flops > 0


@pytest.mark.slow
def test_the_checks_before_the_first_update_hold():
    checks = []
    iterate("separate", [0], checks.extend, **VARIANTS["once"])
    assert len(checks) == 5 and all(check.passed for check in checks)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "variant", "groups"), [
    ("custom", "stopped", {"0-3": ["advantages", "log-probabilities", "policy update"],
                           "4-5": ["critic update", "reference", "values"], "6-7": ["copy of weights", "generate", "reward"]}),
    ("interleave", "stopped",
        {"0-3": ["advantages", "generate", "log-probabilities", "policy and critic update", "reference", "values"],
         "4-7": ["advantages", "generate", "log-probabilities", "policy and critic update", "reward", "values"]}),
])
def test_each_program_of_an_iteration_runs_once_on_its_devices_and_the_rest_is_idle_time(place, variant, groups, placed):
    rows = read_device_times(placed(place, variant).directory / FILE)
    assert [(row.iteration, row.first) for row in rows] == [(1, True), (2, False)]
    for row in rows:
        assert {group: sorted(program.name for program in row.on(group)) for group in row.groups} == groups
        for group in row.groups:
            ends = [0.0, *(program.end for program in row.on(group))]
            starts = [*(program.start for program in row.on(group)), row.seconds]
            assert all(end <= start + 1e-5 for end, start in zip(ends, starts, strict=True))
            idle = sum(start - end for start, end in zip(starts, ends, strict=True))
            assert idle + sum(busy_seconds([row], group).values()) == pytest.approx(row.seconds)
