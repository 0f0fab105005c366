"""Damaged, exchanged and renamed checkpoints and parameters are found, never trained on."""

from __future__ import annotations

import logging
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.models.checkpoints.orbax import load_params, save_params
from jaxalign.steps.checkpoint import Checkpointer
from tests import tiny

ABSTRACT = {"x": jax.ShapeDtypeStruct((300, 7), jnp.float32), "n": jax.ShapeDtypeStruct((), jnp.int32)}
ACTS = ("flip", "cut", "empty", "delete", "text")


def state(step: int) -> dict:
    return {"x": jnp.asarray(np.random.default_rng(step).normal(size=(300, 7)), jnp.float32), "n": jnp.int32(step)}


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact") / "checkpoints"
    save(folder, 10, 20)
    save_params(folder.parent / "params", tiny.place(tiny.model(), tiny.host_params()))
    return folder.parent


def save(folder, *steps, run="a"):
    checkpointer = Checkpointer(folder, run)
    for step in steps:
        checkpointer.save(step, state(step))
    checkpointer.close()


def restore(folder, run="a"):
    checkpointer = Checkpointer(folder, run)
    try:
        return checkpointer.restore(ABSTRACT)
    finally:
        checkpointer.close()


def damage(path, act: str, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if act == "flip" and content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif act == "cut":
        content = content[: rng.randrange(max(1, len(content)))]
    elif act == "empty":
        content = b""
    elif act == "text":
        content = b"[" * 100_000
    path.write_bytes(content)
    if act == "delete":
        path.unlink()


@pytest.mark.medium
@pytest.mark.variants(1)
@pytest.mark.parametrize("act", ACTS)
def test_a_damaged_checkpoint_is_never_used(intact, tmp_path, act, caplog):
    """After damage at a random place, the restored state is that of the newest checkpoint, or an older one with a warning."""
    rng, fallen_back = random.Random(act), 0
    for trial in range(20):
        folder = tmp_path / str(trial)
        shutil.copytree(intact / "checkpoints", folder)
        damage(rng.choice([path for path in sorted((folder / "20").rglob("*")) if path.is_file()]), act, rng)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "jaxalign"):
            step, restored = restore(folder)
        assert step in (10, 20)
        np.testing.assert_array_equal(restored["x"], state(step)["x"])
        assert int(restored["n"]) == step
        if step == 10:
            fallen_back += 1
            assert f"training resumes from checkpoint 10 in {folder}" in caplog.text and "checkpoint 20 " in caplog.text
            save(folder, 20)
            assert restore(folder)[0] == 20
    assert fallen_back >= 2


@pytest.mark.parametrize("act", ACTS)
def test_damaged_parameters_are_never_used(intact, tmp_path, act):
    rng, refused, expected = random.Random(act), 0, tiny.host_params()
    for trial in range(20):
        folder = tmp_path / str(trial)
        shutil.copytree(intact / "params", folder)
        damage(rng.choice([path for path in sorted(folder.rglob("*")) if path.is_file()]), act, rng)
        try:
            params = load_params(folder, tiny.model())
        except UserError as error:
            refused += 1
            assert str(error).startswith(f"the parameters at {folder} ") and "\n" not in str(error) and len(str(error)) < 700
        else:
            jax.tree.map(np.testing.assert_array_equal, tiny.to_host(params), expected)
    assert refused >= 2


def test_exchanged_and_renamed_checkpoints_are_found(intact, tmp_path, caplog):
    exchanged = tmp_path / "exchanged"
    shutil.copytree(intact / "checkpoints", exchanged)
    (exchanged / "20").rename(exchanged / "x")
    (exchanged / "10").rename(exchanged / "20")
    (exchanged / "x").rename(exchanged / "10")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be used: checkpoint 20 .* \(it is checkpoint 10, renamed"):
        restore(exchanged)
    renamed = tmp_path / "renamed"
    shutil.copytree(intact / "checkpoints", renamed)
    (renamed / "20").rename(renamed / "999")
    assert restore(renamed)[0] == 10
    assert "checkpoint 999 cannot be used (it is checkpoint 20, renamed); training resumes from checkpoint 10" in caplog.text
    with pytest.raises(UserError, match="checkpoint 20 in .* was written by another stage or with another config"):
        restore(intact / "checkpoints", run="b")


def test_a_state_of_another_shape_keeps_the_checkpoints(intact, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(intact / "checkpoints", folder)
    checkpointer = Checkpointer(folder, "a")
    with pytest.raises(UserError, match="no checkpoint in .* can be used: checkpoint 20 cannot be used"):
        checkpointer.restore(ABSTRACT | {"x": jax.ShapeDtypeStruct((4, 4), jnp.float32)})
    checkpointer.close()
    assert restore(folder)[0] == 20
