"""One process resumes a run of two and the reverse, on any mesh; on the same mesh the result is bit-identical."""

from __future__ import annotations

import pathlib
import shutil
import sys

import jax
import numpy as np
import pytest

from jaxalign.config import Optimizer
from jaxalign.data.loader import EpochLoader
from jaxalign.data.packing import pack
from jaxalign.parallel import distributed, hosts
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.steps.arguments import LmArguments
from jaxalign.steps.checkpoint import Checkpointer
from jaxalign.steps.lm_step import lm_step
from jaxalign.steps.loop import Loop
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.state import abstract_state, init_state
from jaxalign.tracking.metrics import read_metrics
from tests import processes, tiny

pytestmark = [pytest.mark.process, pytest.mark.slow]

# data, fsdp, tensor: of two processes with four devices each, and of one process. Both processes are needed for a whole weight,
# and both have the weights of the norms.
MANY, ONE = (1, 4, 2), (1, 1, 2)
STEPS, CUT = 4, 2
RNG = np.random.default_rng(0)
ROWS = pack([(RNG.integers(0, 32, 9).tolist(), [1.0] * 9) for _ in range(32)], 18)[0]
OPTIMIZER = make_optimizer(Optimizer(learning_rate=1e-2, warmup_steps=2), STEPS)
LOADER = EpochLoader(len(ROWS.tokens), 8, seed=0)


def train(directory: pathlib.Path, mesh, stop: int | None = None):
    """Return the state after STEPS steps, resumed from `directory`; with `stop`, that after so many steps."""
    model = tiny.model(mesh)

    def step_fn(state, step):
        given = LmArguments(model=model, optimizer=OPTIMIZER, batch=place_rows(model.sharding, ROWS, LOADER.indices(step)))
        return lm_step(state, given)

    loop = Loop("tiny", directory, STEPS, CUT, stop=lambda state, completed: completed == stop)
    key = jax.random.key(0)
    abstract = abstract_state(model, OPTIMIZER)
    return tiny.run_loop(loop, lambda: init_state(model, OPTIMIZER, model.init(key), key), abstract, step_fn)


def restored(directory: pathlib.Path, mesh):
    checkpointer = Checkpointer(directory / "checkpoints")
    try:
        return checkpointer.restore(abstract_state(tiny.model(mesh), OPTIMIZER))
    finally:
        checkpointer.close()


def flat(state) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): value for path, value in jax.tree_util.tree_leaves_with_path(fetch(state))}


def program() -> None:
    """The program of each of the two processes."""
    group, (folder,) = distributed.take_flags(sys.argv[1:])
    folder = pathlib.Path(folder)
    with distributed.running(group, lambda error: None):
        assert jax.device_count() == 8 and jax.local_device_count() == 4
        train(folder / "cut", MANY, stop=CUT)
        hosts.once(lambda: str(shutil.copytree(folder / "cut", folder / "of many")))
        found = {
            "whole": train(folder / "whole", MANY), "resumed": train(folder / "cut", MANY),
            "restored": restored(folder / "of many", MANY), "of one": train(folder / "of one", MANY),
        }
        for name, state in found.items():
            values = flat(state)
            if hosts.is_first():
                np.savez(folder / f"{name}.npz", **values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """The checkpoints of the two processes, and of a one-process run that they resumed."""
    folder = tmp_path_factory.mktemp("two")
    train(folder / "of one", ONE, stop=CUT)
    shutil.copytree(folder / "of one", folder / "one")
    command = ["-c", f"from {__name__} import program; program()", str(folder)]
    processes.run_well(2, command)
    return folder


def same(found: dict, expected: dict, rtol: float = 0.0, atol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=atol, err_msg=name)


def test_two_processes_resume_bit_exactly_on_the_same_mesh(folder):
    same(np.load(folder / "resumed.npz"), np.load(folder / "whole.npz"))
    assert (folder / "cut" / "metrics.jsonl").read_bytes() == (folder / "whole" / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("mesh", [MANY, ONE, None])
def test_one_process_reads_bit_exactly_what_two_wrote(folder, mesh):
    same(flat(restored(folder / "of many", mesh)), np.load(folder / "restored.npz"))


# Weights and moments are at most about 1, where one unit in the last place of float32 is 1.2e-7; two steps change a few units.
ROUNDING = {"rtol": 0.0, "atol": 1e-6}


def test_one_process_resumes_a_run_of_two_on_another_mesh(folder):
    same(flat(train(folder / "of many", ONE)), np.load(folder / "whole.npz"), **ROUNDING)
    losses = [[row["loss"] for row in read_metrics(folder / name / "metrics.jsonl")] for name in ("of many", "whole")]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert len(losses[0]) == STEPS


def test_two_processes_resume_a_run_of_one_on_another_mesh(folder):
    same(np.load(folder / "of one.npz"), flat(train(folder / "one", ONE)), **ROUNDING)
    losses = [[row["loss"] for row in read_metrics(folder / name / "metrics.jsonl")] for name in ("of one", "one")]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_each_step_is_written_once(folder):
    for name in ("whole", "cut", "of one"):
        assert [row["step"] for row in read_metrics(folder / name / "metrics.jsonl")] == list(range(STEPS))
        assert (folder / name / "timing.jsonl").read_text().count('"start"') == (1 if name == "whole" else 2)
