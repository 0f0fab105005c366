"""Roles: which may run at the same time, and names of reward models."""

from __future__ import annotations

import itertools

import pytest

from jaxalign.errors import UserError
from jaxalign.placement.roles import PHASES, ROLES, SHADOWS, independent, role_of


def test_only_the_policy_and_the_critic_are_trained_and_have_shadows():
    assert [role.name for role in ROLES.values() if role.trained] == ["policy", "critic"]
    assert SHADOWS == {"policy": "generator", "critic": "value"}


def test_the_pairs_that_may_run_at_the_same_time():
    """The forward passes of scoring, and the two updates; nothing else, as every phase needs the one before."""
    scoring = [frozenset(pair) for pair in itertools.combinations(("reference", "reward", "judge", "value"), 2)]
    together = {frozenset(pair) for pair in itertools.combinations(ROLES, 2) if independent(*pair)}
    assert together == {*scoring, frozenset(("policy", "critic"))}


@pytest.mark.parametrize("pair", list(itertools.product(ROLES, repeat=2)))
def test_independence_has_no_order(pair):
    assert independent(*pair) == independent(*reversed(pair))


def test_two_reward_models_are_independent_but_not_one_of_itself():
    assert independent("reward.helpful", "reward.harmless") and not independent("reward.helpful", "reward.helpful")


def test_every_role_runs_in_a_known_phase_and_needs_known_roles():
    for role in ROLES.values():
        assert role.phases and set(role.phases) <= set(PHASES) and set().union(*role.phases.values()) <= set(ROLES)


@pytest.mark.parametrize(("name", "message"), [
    ("refernce", "'refernce' is not a role; did you mean reference?"),
    ("reward.", "'reward.' is not a role; did you mean reward?"),
    ("policy.a", "'policy.a' is not a role; did you mean policy?"),
    ("xyz", "'xyz' is not a role; it must be one of policy, critic, reference, reward, judge, generator, value")])
def test_unknown_roles(name, message):
    with pytest.raises(UserError) as error:
        role_of(name)
    assert str(error.value) == message
