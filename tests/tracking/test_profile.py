"""Which steps are traced, and where the traces lie."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxalign.errors import UserError
from jaxalign.tracking.profile import Profiler, parse


def test_what_a_user_may_write():
    assert parse("ppo:10:3") == ("ppo", 10, 3)
    assert parse("sft:0") == ("sft", 0, 1)
    for wrong in ("ppo", "ppo:", "ppo:x", "ppo:1:0", ":1", "ppo:-1"):
        with pytest.raises(UserError, match="STAGE:STEP"):
            parse(wrong)


def test_named_steps_alone_are_traced(tmp_path):
    profiler, traced = Profiler("ppo:1", "ppo", tmp_path / "profile"), []
    for step in range(3):
        with profiler.step(step) as on:
            jnp.ones(3).sum().block_until_ready()
            traced.append(on)
    assert traced == [False, True, False]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_another_stage_is_not(tmp_path):
    with Profiler("sft:0", "ppo", tmp_path / "profile").step(0) as on:
        assert not on
    assert not (tmp_path / "profile").exists()
