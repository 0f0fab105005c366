"""Programs compiled in threads: each compiled once and found by the call, with failures that do not stop the call."""

from __future__ import annotations

import logging
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.parallel.ahead import Ahead
from jaxalign.parallel.sharding import one_device
from tests.compilations import SEEN, compiled

X = jax.ShapeDtypeStruct((3,), jnp.float32)


@pytest.mark.parametrize("has_place", [False, True])
def test_the_call_uses_the_program_compiled_ahead(has_place):
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=1)
    def found_ahead(x):
        return 2 * x + 1

    step = jax.jit(found_ahead)
    SEEN.clear()
    with Ahead() as ahead:
        placed = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=one_device().replicated)
        ahead.add(step, (placed if has_place else X,)).result()
    x = np.arange(3, dtype=np.float32)
    assert step(jax.device_put(x, one_device().replicated) if has_place else x).tolist() == [1, 3, 5]
    (thread,) = compiled("found_ahead")
    assert thread.startswith("compile")


def test_an_early_call_waits_and_compiles_nothing_again():
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=1)
    def called_early(x):
        for _ in range(300):
            x = jnp.tanh(x) + jnp.sin(x)
        return x

    step = jax.jit(called_early)
    SEEN.clear()
    with Ahead(1) as ahead:
        future = ahead.add(step, (X,))
        step(np.zeros(3, np.float32))
        future.result()
    assert len(compiled("called_early")) == 1


def test_arguments_can_be_computed_by_a_function_in_the_thread():
    step = jax.jit(lambda x: x + 1)
    with Ahead() as ahead:
        assert ahead.add(step, lambda: (X,)).result().out_info.shape == (3,)


def test_a_program_that_cannot_be_compiled_gets_a_warning_and_stops_nothing(caplog):
    def broken(x):
        return x @ jnp.zeros((7, 7))

    with caplog.at_level(logging.WARNING, logger="jaxalign"), Ahead() as ahead:
        assert ahead.add(jax.jit(broken), (X,)).result() is None
        assert ahead.add(jax.jit(lambda x: x), (X,)).result() is not None
    assert "broken could not be compiled ahead" in caplog.text and "dot_general" in caplog.text


def test_only_the_call_reports_an_error_that_the_user_can_fix(caplog):
    @jax.jit
    def refused(x):
        raise UserError("mend this")

    with Ahead() as ahead:
        assert ahead.add(refused, (jax.ShapeDtypeStruct((2,), "float32"),)).result() is None
    assert not caplog.records


def test_compilations_that_have_not_started_are_dropped_at_the_end():
    begun, gate = threading.Event(), threading.Event()

    def slow():
        begun.set()
        gate.wait()
        return (X,)

    with Ahead(1) as ahead:
        first, second = ahead.add(jax.jit(lambda x: x), slow), ahead.add(jax.jit(lambda x: x), (X,))
        begun.wait()
    gate.set()
    assert first.result() is not None and second.cancelled()
