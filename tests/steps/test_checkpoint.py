"""Checkpoints save the state exactly, all of it or nothing, and restore it on any mesh."""

from __future__ import annotations

import dataclasses
import errno
import logging
import shutil
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.rl.state import abstract_ppo_state
from jaxalign.steps.checkpoint import Checkpointer, copy_params, load_params, save_params
from jaxalign.storage import write_atomically
from tests import tiny


def saved(directory, states):
    checkpointer = Checkpointer(directory)
    for step, state in states.items():
        checkpointer.save(step, state)
    checkpointer.close()


def restored(directory, abstract):
    checkpointer = Checkpointer(directory)
    try:
        return checkpointer.restore(abstract)
    finally:
        checkpointer.close()


_FULL = ('RESOURCE_EXHAUSTED: Error writing local file "/x/_sharding": Failed to write 4335 bytes to file 12: '
         "No space left on device [os_error_code='28']")  # TensorStore's message.


@pytest.mark.parametrize("fails", ["save", "wait_until_finished"])
def test_a_full_disk_raises_the_systems_error(tmp_path, monkeypatch, caplog, fails):
    """Entry points report it as one sentence; the threads of Orbax print nothing else."""
    def fail(*_, **__):
        for name in ("absl", "asyncio"):
            logging.getLogger(name).error("a thread failed", exc_info=ValueError(_FULL))
        raise ValueError(_FULL)

    checkpointer = Checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._manager, fails, fail)
        with pytest.raises(OSError, match="No space left on device") as raised:
            checkpointer.save(1, {"x": jnp.zeros(2)})
            checkpointer.close()
    assert raised.value.errno == errno.ENOSPC and not caplog.records
    checkpointer.close()


def test_a_folder_that_was_moved_during_the_run_is_refused_and_not_begun_again(tmp_path):
    (tmp_path / "run").mkdir()
    checkpointer = Checkpointer(tmp_path / "run/checkpoints")
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="run/checkpoints does not exist"):
        checkpointer.save(1, {"x": jnp.zeros(2)})
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="run does not exist"):
        write_atomically(tmp_path / "run/stage/rows.jsonl", "")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_was_moved_and_created_again_is_refused(tmp_path):
    """A save of Orbax that is under way creates the folder and its parents again."""
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    (tmp_path / "checkpoints").mkdir()
    for call in (lambda: checkpointer.save(1, {"x": jnp.zeros(2)}), checkpointer.close):
        with pytest.raises(UserError, match="checkpoints does not exist, or lost files"):
            call()


def test_the_errors_of_orbax_about_files_of_a_moved_folder_are_explained(tmp_path, monkeypatch, caplog):
    """Orbax raises this error if the folder is replaced while its thread finishes a checkpoint."""
    def fail(*_, **__):
        (tmp_path / "checkpoints").rename(tmp_path / "moved")
        (tmp_path / "checkpoints").mkdir()
        error = ValueError("Save failed: 1/10 params are missing .zarray in checkpoint:\n1.")
        logging.getLogger("absl").error("[process=0] Save Finalize thread (save_finalize) failed.", exc_info=error)
        raise error

    checkpointer = Checkpointer(tmp_path / "checkpoints")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="checkpoints does not exist, or lost files"):
        patch.setattr(checkpointer._manager, "wait_until_finished", fail)
        checkpointer.close()
    assert not caplog.records


LIMITED = """
import resource, sys
import jax.numpy as jnp
from jaxalign.errors import run_to_the_end
from jaxalign.steps.checkpoint import Checkpointer

def main():
    checkpointer = Checkpointer(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        checkpointer.save(1, {str(i): jnp.arange(50_000.0) ** 0.5 for i in range(20)})
        checkpointer.close()
    except OSError as error:
        print(error.errno)
        return 2

run_to_the_end(main)
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_limit_of_file_sizes_gives_one_error_and_no_output_of_threads(tmp_path):
    ended = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path / "checkpoints")], capture_output=True, text=True,
                           timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, f"{errno.EFBIG}\n", "")


def test_other_checkpoint_errors_are_raised_unchanged(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="no such thing"):
        patch.setattr(checkpointer._manager, "save", lambda *_, **__: (_ for _ in ()).throw(ValueError("no such thing")))
        checkpointer.save(1, {"x": jnp.zeros(2)})
    checkpointer.close()


@pytest.mark.parametrize(("first", "second"), [
    (None, None), ((2, 2, 2), None), (None, (2, 2, 2)), ((2, 2, 2), (1, 4, 2)), ((8, 1, 1), (2, 1, 1)),
])
def test_pitfall_12_all_state_is_restored_on_any_mesh(tmp_path, first, second):
    """Other systems did not save the KL controller and the PRNG, used two managers for actor and critic, and needed the same
    number of devices to restore. Here one checkpoint has both models with optimizers, steps, key and coefficient."""
    before = tiny.state(tiny.setup(first))
    before = dataclasses.replace(before, kl_coef=before.kl_coef + 0.123)
    saved(tmp_path, {7: before})
    abstract = abstract_ppo_state(tiny.setup(second))
    step, after = restored(tmp_path, abstract)
    assert step == 7
    chex.assert_trees_all_equal(tiny.to_host(after), tiny.to_host(before))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, abstract)
    for want, have in zip(jax.tree.leaves(abstract), jax.tree.leaves(after), strict=True):
        assert len(have.sharding.device_set) == 1 if second is None else have.sharding == want.sharding


def test_a_checkpoint_keeps_its_values_when_the_buffers_are_donated_immediately(tmp_path):
    """Writing continues in the background while the next step overwrites the memory."""
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = {f"part {i}": jnp.full((256, 256), float(i)) for i in range(12)}
    checkpointer = Checkpointer(tmp_path)
    for step in range(1, 4):
        state = advance(state)
        checkpointer.save(step, state)
        for _ in range(20):
            state = advance(state)
    checkpointer.close()
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    _, found = restored(tmp_path, abstract)
    for i in range(12):  # before step 3: 3 steps and two runs of 20 more
        np.testing.assert_array_equal(found[f"part {i}"], np.full((256, 256), i + 43.0))


def test_the_newest_two_are_kept_and_the_newest_is_restored(tmp_path):
    saved(tmp_path, {step: {"x": jnp.float32(step)} for step in (1, 2, 3, 4)})
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["3", "4"]
    step, found = restored(tmp_path, {"x": jax.ShapeDtypeStruct((), jnp.float32)})
    assert (step, float(found["x"])) == (4, 4.0)


def test_a_restore_without_a_problem_logs_no_warning(tmp_path, caplog):
    saved(tmp_path, {1: {"x": jnp.float32(1)}})
    restored(tmp_path, {"x": jax.ShapeDtypeStruct((), jnp.float32)})
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.latest() is None
    checkpointer.close()


def test_half_written_and_half_deleted_checkpoints_of_a_killed_process_are_ignored(tmp_path):
    """A checkpoint gets its number only once it is complete; deletion starts with the oldest."""
    abstract = {"x": jax.ShapeDtypeStruct((4,), jnp.float32)}
    saved(tmp_path, {step: {"x": jnp.full(4, float(step))} for step in (1, 2, 3)})
    (tmp_path / "4.orbax-checkpoint-tmp" / "default").mkdir(parents=True)
    (tmp_path / "4.orbax-checkpoint-tmp" / "default" / "half").write_bytes(b"half")
    oldest = tmp_path / "2"
    for path in sorted(oldest.rglob("*"), key=lambda p: -len(p.parts))[::2]:
        if path.is_file():
            path.unlink()
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.latest() == 3
    np.testing.assert_array_equal(checkpointer.restore(abstract)[1]["x"], np.full(4, 3.0))
    checkpointer.save(4, {"x": jnp.full(4, 4.0)})
    checkpointer.save(5, {"x": jnp.full(4, 5.0)})
    checkpointer.close()
    assert restored(tmp_path, abstract)[0] == 5
    assert not list(tmp_path.glob("*tmp*"))


def test_parameters_are_written_once_and_read_onto_any_mesh(tmp_path):
    model = tiny.model((2, 2, 2))
    save_params(tmp_path / "params", tiny.place(model, tiny.host_params()))
    save_params(tmp_path / "params", tiny.place(model, tiny.host_params(seed=1)))  # an existing complete copy is kept
    for other in (None, (1, 4, 2)):
        found = load_params(tmp_path / "params", tiny.model(other))
        chex.assert_trees_all_equal(tiny.to_host(found), tiny.host_params())
    assert [path.name for path in tmp_path.iterdir()] == ["params"]


def test_parameters_half_written_by_a_killed_process_are_rewritten(tmp_path):
    (tmp_path / "params.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "params.orbax-checkpoint-tmp" / "half").write_bytes(b"half")
    save_params(tmp_path / "params", tiny.place(tiny.model(), tiny.host_params()))
    chex.assert_trees_all_equal(tiny.to_host(load_params(tmp_path / "params", tiny.model())), tiny.host_params())


def test_missing_or_mismatched_parameters_are_reported_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="no parameters at .*params; the stage that writes them has not finished"):
        load_params(tmp_path / "params", tiny.model())
    save_params(tmp_path / "params", tiny.place(tiny.model(), tiny.host_params()))
    for other, difference in [
        (tiny.model(vocab=48), r"embedding is \(32, 16\) in the file and \(48, 16\) in the config"),
        (tiny.model(head="scalar"), r"score is missing in the file and \(16,\) in the config"),
        (tiny.model(layers=3), r"do not fit config.model: blocks.attention.key is \(1, 16, 2, 4\)"),
    ]:
        with pytest.raises(UserError, match=difference):
            load_params(tmp_path / "params", other)


def test_copied_parameters_outlive_the_donated_ones():
    params = tiny.place(tiny.model(), tiny.host_params())
    copy = copy_params(params)
    jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(params)
    chex.assert_trees_all_equal(tiny.to_host(copy), tiny.host_params())


@pytest.mark.parametrize("share", (0, 2))
def test_a_truncated_metadata_file_is_reported_without_the_exceptions_of_orbax(tmp_path, share):
    """Orbax takes its files to be whole, and raises AttributeError or TypeError for an empty or a cut one."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": jnp.zeros(2)})
    checkpointer.close()
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*METADATA*"))
    assert len(files) > 1
    for number, file in enumerate(files):
        copy = tmp_path.parent / f"{tmp_path.name}-{share}-{number}"
        shutil.copytree(tmp_path, copy)
        content = (copy / file).read_bytes()
        (copy / file).write_bytes(content[: share and len(content) // share])
        with pytest.raises(UserError) as caught:
            Checkpointer(copy).restore({"x": jnp.zeros(2)})
        assert "checkpoint 1 cannot be used (" in str(caught.value) and "Error" not in str(caught.value), file
