"""Sampling with `jax_enable_x64`, whose option applies to a whole process."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
from tests import tiny
setup = tiny.setup()
rollout = tiny.rollout(setup, tiny.state(setup).policy.params)
print(rollout.tokens.dtype, rollout.logprobs.dtype, int(rollout.response_length.min()) > 0)
"""


@pytest.mark.slow
@pytest.mark.process
def test_sampling_works_with_64_bit_numbers():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | {"JAX_ENABLE_X64": "1"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["int32", "float32", "True"]
    assert "could not be compiled" not in done.stderr
