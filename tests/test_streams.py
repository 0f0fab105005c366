"""Streams of random numbers have names, and no two uses share one."""

import jax
import numpy as np
import pytest

from jaxalign import streams
from jaxalign.registry.stages import STAGES


def test_each_built_in_stage_has_a_number_of_its_own():
    assert set(streams.STAGES) == set(STAGES.names())
    assert len(set(streams.STAGES.values())) == len(streams.STAGES)


@pytest.mark.parametrize("table", (streams.LOADERS, streams.PRINCIPLES, streams.DATA), ids=("loaders", "principles", "data"))
def test_no_two_uses_share_a_number(table):
    assert len(set(table.values())) == len(table)


def test_two_stages_with_names_of_one_length_shuffle_differently():
    orders = [np.random.default_rng([0, streams.loader_stream(name), 0]).permutation(50) for name in ("tom", "sue", "sft")]
    assert len({tuple(order) for order in orders}) == 3


def test_the_shuffle_of_a_member_is_that_of_no_other_stage():
    members = range(streams.LOADERS["preference"], streams.LOADERS["preference"] + 64)
    assert not set(members) & {number for name, number in streams.LOADERS.items() if name != "preference"}


def test_no_head_of_an_ensemble_shares_the_key_of_the_state_or_the_adapters():
    heads = [streams.member_head(number) for number in range(20)]
    assert len(set(heads)) == 20 and not {streams.STATE, streams.ADAPTERS} & set(heads)


@pytest.mark.parametrize("stage", ("ppo", "online_dpo"))
def test_no_use_of_a_stage_that_trains_shares_the_key_of_its_state_or_its_adapters(stage):
    uses = streams.KEYS[stage].values()
    assert len(set(uses)) == len(uses) and not {streams.STATE, streams.ADAPTERS} & set(uses)


def test_a_users_stage_has_keys_that_no_built_in_stage_has():
    key = lambda name: jax.random.key_data(jax.random.fold_in(jax.random.key(3), streams.stage_number(name)))  # noqa: E731
    keys = {tuple(np.asarray(key(name)).tolist()) for name in (*STAGES.names(), "mine", "theirs")}
    assert len(keys) == len(STAGES.names()) + 2
