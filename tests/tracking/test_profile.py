"""Which steps are traced, and where the traces lie."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxalign.errors import UserError
from jaxalign.tracking.profile import Profiler, parse

# In a process of its own: JAX's profiler also asks a TPU's library that another test has loaded, and crashes without a TPU.
_STEPS = """
import pathlib, sys
import jax.numpy as jnp
from jaxalign.tracking.profile import Profiler
profiler = Profiler("ppo:1", "ppo", pathlib.Path(sys.argv[1]))
for step in range(3):
    with profiler.step(step) as on:
        jnp.ones(3).sum().block_until_ready()
        print(on)
"""


def test_what_a_user_may_write():
    assert parse("ppo:10:3") == ("ppo", 10, 3)
    assert parse("sft:0") == ("sft", 0, 1)
    for wrong in ("ppo", "ppo:", "ppo:x", "ppo:1:0", ":1", "ppo:-1"):
        with pytest.raises(UserError, match="STAGE:STEP"):
            parse(wrong)


def test_named_steps_alone_are_traced(tmp_path):
    command = [sys.executable, "-c", _STEPS, str(tmp_path / "profile")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True", "False"]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_another_stage_is_not(tmp_path):
    with Profiler("sft:0", "ppo", tmp_path / "profile").step(0) as on:
        assert not on
    assert not (tmp_path / "profile").exists()
