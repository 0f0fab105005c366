"""Offloading on two processes: each process moves its own shards."""

from __future__ import annotations

import pathlib
import sys

import chex
import jax
import pytest

from jaxalign.parallel import distributed
from jaxalign.parallel.rows import fetch
from jaxalign.steps.checkpoint import Checkpointer
from jaxalign.steps.offload import FrozenRole, move_optimizer_state, to_device, to_host
from jaxalign.steps.state import abstract_state, init_state
from tests import processes, tiny
from tests.steps.offloading import OPTIMIZER, kinds

pytestmark = pytest.mark.process

MESH = (2, 2, 2)


def program() -> None:
    """The program of each of the two processes."""
    group, (folder,) = distributed.take_flags(sys.argv[1:])
    with distributed.running(group, lambda error: None):
        move(pathlib.Path(folder))


def move(folder: pathlib.Path) -> None:
    model = tiny.model(MESH)
    state = init_state(model, OPTIMIZER, model.init(jax.random.key(0)), jax.random.key(4))
    before = fetch(state)
    assert not state.params["embedding"].is_fully_addressable
    state = move_optimizer_state(state, to_host)
    assert kinds(state.opt_state) == {"pinned_host"}
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, state)
    state = move_optimizer_state(state, to_device)
    assert kinds(state.opt_state) == {"device"}
    chex.assert_trees_all_equal(fetch(state), before)
    checkpointer.close()
    checkpointer = Checkpointer(folder)
    _, state = checkpointer.restore(move_optimizer_state(abstract_state(model, OPTIMIZER), to_host))
    checkpointer.close()
    assert kinds(state.opt_state) == {"pinned_host"}
    role = FrozenRole(state.params, offload=True)
    with role.on_device() as params:
        chex.assert_trees_all_equal(fetch(params), before.params)
    chex.assert_trees_all_equal(fetch(move_optimizer_state(state, to_device).opt_state), before.opt_state)
    print("all moved")


@pytest.mark.slow
def test_two_processes_move_their_shards_and_read_them_back(tmp_path):
    found = processes.run_well(2, ["-c", f"from {__name__} import program; program()", str(tmp_path)])
    assert "all moved" in found[0].out  # The others print nothing.
