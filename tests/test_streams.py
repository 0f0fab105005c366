"""Streams of random numbers have names, and no two uses share a stream."""

import jax
import numpy as np
import pytest

from jaxalign import streams
from jaxalign.registry.stages import STAGES


def test_each_built_in_stage_has_its_own_number():
    assert set(streams.STAGES) == set(STAGES.names())
    assert len(set(streams.STAGES.values())) == len(streams.STAGES)


@pytest.mark.parametrize("table", (streams.LOADERS, streams.PRINCIPLES, streams.DATA), ids=("loaders", "principles", "data"))
def test_no_two_uses_share_a_number(table):
    assert len(set(table.values())) == len(table)


def test_stages_with_names_of_the_same_length_shuffle_differently():
    numbers = [streams.number_of(name, streams.LOADERS) for name in ("tom", "sue", "sft")]
    orders = [np.random.default_rng([0, number, 0]).permutation(50) for number in numbers]
    assert len({tuple(order) for order in orders}) == 3


def test_no_ensemble_member_shares_its_shuffle_with_another_stage():
    members = range(streams.LOADERS["preference"], streams.LOADERS["preference"] + 64)
    assert not set(members) & {number for name, number in streams.LOADERS.items() if name != "preference"}


def test_no_ensemble_head_shares_the_key_of_the_state_or_the_adapters():
    heads = [streams.member_head(number) for number in range(20)]
    assert len(set(heads)) == 20 and not {streams.STATE, streams.ADAPTERS} & set(heads)


@pytest.mark.parametrize("stage", ("ppo", "online_dpo"))
def test_no_use_of_a_training_stage_shares_the_key_of_its_state_or_adapters(stage):
    uses = streams.KEYS[stage].values()
    assert len(set(uses)) == len(uses) and not {streams.STATE, streams.ADAPTERS} & set(uses)


def test_a_users_stage_shares_no_key_with_a_built_in_stage():
    def key(name):
        return jax.random.key_data(jax.random.fold_in(jax.random.key(3), streams.number_of(name, streams.STAGES)))

    keys = {tuple(np.asarray(key(name)).tolist()) for name in (*STAGES.names(), "mine", "theirs")}
    assert len(keys) == len(STAGES.names()) + 2
