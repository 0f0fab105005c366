"""The steps that are traced, and the location of the traces."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxalign.config.root import traced_steps
from jaxalign.errors import UserError
from jaxalign.tracking.profile import Profiler

# Run in a separate process: JAX's profiler also queries a TPU library that another test loaded, and crashes without a TPU.
_STEPS = """
import pathlib, sys
import jax.numpy as jnp
from jaxalign.tracking.profile import Profiler
profiler = Profiler("ppo:1", "ppo", pathlib.Path(sys.argv[1]), 3)
for step in range(3):
    with profiler.step(step) as on:
        jnp.ones(3).sum().block_until_ready()
        print(on)
"""


def test_the_accepted_forms_of_the_option():
    assert traced_steps("ppo:10:3") == ("ppo", 10, 3)
    assert traced_steps("sft:0") == ("sft", 0, 1)
    for wrong in ("ppo", "ppo:", "ppo:x", "ppo:1:0", ":1", "ppo:-1"):
        with pytest.raises(UserError, match="STAGE:STEP"):
            traced_steps(wrong)


@pytest.mark.process
def test_only_the_named_steps_are_traced(tmp_path):
    command = [sys.executable, "-c", _STEPS, str(tmp_path / "profile")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True", "False"]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_another_stage_is_not_traced(tmp_path):
    with Profiler("sft:0", "ppo", tmp_path / "profile", 3).step(0) as on:
        assert not on
    assert not (tmp_path / "profile").exists()


def test_steps_that_do_not_exist_are_reported(tmp_path, caplog):
    Profiler("ppo:2:1", "ppo", tmp_path, 3)
    assert not caplog.records
    Profiler("ppo:2:3", "ppo", tmp_path, 3)
    assert "config.profile is 'ppo:2:3', but the steps of ppo are numbered 0 to 2" in caplog.text
