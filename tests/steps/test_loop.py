"""The training loop: an interrupted run ends like an uninterrupted one, byte for byte."""

from __future__ import annotations

import json
import time

import chex
import jax
import numpy as np
import pytest

from jaxalign import interrupts
from jaxalign.config import Optimizer
from jaxalign.data.loader import EpochLoader, take
from jaxalign.data.packing import pack
from jaxalign.errors import UserError
from jaxalign.steps import lm_step as lm_module
from jaxalign.steps.arguments import LmArguments
from jaxalign.steps.lm_step import lm_step
from jaxalign.steps.loop import Loop
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.state import abstract_state, init_state
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.timing import read_timing
from tests import tiny

STEPS, EVERY = 10, 3
RNG = np.random.default_rng(0)
ROWS = pack([(RNG.integers(0, 32, 9).tolist(), [1.0] * 9) for _ in range(16)], 18)[0]
MODEL, OPTIMIZER = tiny.model(), make_optimizer(Optimizer(learning_rate=1e-2, warmup_steps=2), STEPS)
LOADER = EpochLoader(len(ROWS.tokens), 4, seed=0)


class Killed(Exception):
    """Simulates the end of a process."""


def train(directory, stop_before=None, seen=None, mesh=None):
    """Train in `directory`, from its newest checkpoint if there is one."""
    model = MODEL if mesh is None else tiny.model(mesh)

    def step_fn(state, step):
        if step == stop_before:
            raise Killed
        if seen is not None:
            seen.append(step)
        assert int(state.step) == step
        given = LmArguments(model=model, optimizer=OPTIMIZER, batch=tiny.rows(model, take(ROWS, LOADER.indices(step))))
        return lm_step(state, given)

    def init():
        return init_state(model, OPTIMIZER, tiny.place(model, tiny.host_params()), jax.random.key(9))

    return tiny.to_host(tiny.run_loop(Loop("sft", directory, STEPS, EVERY), init, abstract_state(model, OPTIMIZER), step_fn))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    return train(directory), (directory / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("stops", [[1], [3], [5, 8], [2, 4, 4, 7, 9]])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(tmp_path, uninterrupted, stops):
    """Interruptions before the first checkpoint, at one, between two, and several times with one step repeated."""
    for stop in stops:
        with pytest.raises(Killed):
            train(tmp_path, stop)
    state = train(tmp_path)
    chex.assert_trees_all_equal(state, uninterrupted[0])
    assert (tmp_path / "metrics.jsonl").read_bytes() == uninterrupted[1]


def test_a_signal_ends_the_loop_after_its_step_and_a_checkpoint(tmp_path, uninterrupted, monkeypatch):
    seen = []
    with monkeypatch.context() as patch:
        received = interrupts.received
        patch.setattr(interrupts, "received", lambda: received() or len(seen) == 5)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, seen=seen)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    state = train(tmp_path, seen=seen)
    assert seen == list(range(STEPS))  # No step is repeated, though 5 is no multiple of EVERY.
    chex.assert_trees_all_equal(state, uninterrupted[0])
    assert (tmp_path / "metrics.jsonl").read_bytes() == uninterrupted[1]


def test_rows_after_the_checkpoint_and_a_torn_line_are_removed(tmp_path, uninterrupted):
    """A killed process may have written metrics of steps after its last checkpoint, the last line only in part."""
    with pytest.raises(Killed):
        train(tmp_path, 7)
    path = tmp_path / "metrics.jsonl"
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4, 5]
    with open(path, "a") as file:
        file.write('{"step": 6, "loss": 99.0}\n{"step": 7, "lo')
    train(tmp_path)
    assert path.read_bytes() == uninterrupted[1]


def test_only_steps_after_the_newest_checkpoint_are_repeated(tmp_path):
    with pytest.raises(Killed):
        train(tmp_path, 8)
    seen = []
    train(tmp_path, seen=seen)
    assert seen == [6, 7, 8, 9]
    again = []
    state = train(tmp_path, seen=again)
    assert again == [] and int(state.step) == STEPS


@pytest.mark.medium
def test_an_interrupted_run_traces_the_step_once(tmp_path, monkeypatch):
    """`lm_step` calls `gradient_step` once each time it is traced."""
    jax.clear_caches()
    chex.clear_trace_counter()
    monkeypatch.setattr(lm_module, "gradient_step", chex.assert_max_traces(lm_module.gradient_step, n=1))
    with pytest.raises(Killed):
        train(tmp_path, 5)
    assert int(train(tmp_path).step) == STEPS


def test_a_run_resumes_on_another_mesh(tmp_path, uninterrupted):
    """A run moved from one device to eight after six steps has the same losses up to rounding."""
    with pytest.raises(Killed):
        train(tmp_path, 7)
    train(tmp_path, mesh=(2, 2, 2))
    found = [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    expected = [json.loads(line)["loss"] for line in uninterrupted[1].decode().splitlines()]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_every_step_is_in_the_metrics_once_and_timing_is_separate(tmp_path):
    train(tmp_path)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert set(rows[0]) == {"step", "loss", "grad_norm", "skipped", "tokens"}
    timing = [json.loads(line) for line in (tmp_path / "timing.jsonl").read_text().splitlines()]
    assert [row["phase"] for row in timing] == ["start", "first step"] + ["train", "checkpoint"] * 4
    assert sum(row["tokens"] for row in timing) == sum(row["tokens"] for row in rows)


def test_operations_and_the_time_to_the_first_step_are_recorded(tmp_path):
    loop = Loop(
        "sft", tmp_path, 4, 4, shown=(), flops=lambda step: 10.0 ** step, peak=5e3, began=time.perf_counter() - 100.0
    )
    tiny.run_loop(loop, lambda: {"x": np.float32(0)}, {"x": jax.ShapeDtypeStruct((), np.float32)},
                  lambda state, step: (state, {"loss": 1.0, "tokens": 3}))
    timing = read_timing(tmp_path / "timing.jsonl")
    assert (timing["first step"]["flops"], timing["train"]["flops"], timing["train"]["peak"]) == (0.0, 1110.0, 5e3)
    assert 100.0 < timing["first step"]["since"] < 160.0


def skipping(pattern: str, directory=None, stage="sft"):
    """Train one step per character: "x" skips its update, "o" is a skipped update that the loss scale explains."""
    values = {"x": (1.0, 0.0), "o": (1.0, 1.0), ".": (0.0, 0.0)}

    def step_fn(state, step):
        skipped, overflowed = values[pattern[step]]
        return state + 1, {"loss": np.float32("nan"), "skipped": skipped, "overflowed": overflowed}

    loop = Loop(stage, directory, len(pattern), 1000, progress=False)
    return tiny.run_loop(loop, lambda: np.zeros(()), None, step_fn)


def test_training_stops_when_many_updates_in_a_row_are_skipped(caplog):
    with pytest.raises(UserError, match=r"\[sft\] the gradients of 10 steps in a row, up to step 13, are not finite"):
        skipping("...xxxxxxxxxxxxxxx")
    assert [record.getMessage() for record in caplog.records] == [
        "[sft] the gradient of step 4 is not finite; its update is skipped, and training stops after 10 such steps in a row"
    ]
    with pytest.raises(UserError, match="the gradients of 3 steps in a row, up to step 3, are not finite"):
        skipping("xxx")
    with pytest.raises(UserError, match="the gradients of the only step are not finite"):
        skipping("x")


@pytest.mark.parametrize(("pattern", "warnings"), [("xxxxxxxxx.xxxxxxxxx.", 2), ("o" * 15 + ".", 0), ("x.x.x.", 3), ("...", 0)])
def test_training_goes_on_after_fewer_skipped_updates(pattern, warnings, caplog):
    assert skipping(pattern) == len(pattern)
    assert len(caplog.records) == warnings
