"""Settings for all tests: eight CPU devices, a compile cache that outlives the run, and no silent broadcasting.

The environment is set before the first import of JAX, because JAX reads it only once.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib

_DEVICES = "--xla_force_host_platform_device_count=8"
# Most test programs run once or twice. These options keep their results and cut compile time by a third.
_COMPILE_FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jaxalign-tests"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES} {_COMPILE_FAST}".strip()
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Eight devices on a busy machine may wait for each other longer than the 40 seconds after which XLA ends the process.
    os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=240"
# Set by environment variables, so that child processes of tests share the cache.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

from jaxalign.parallel.simulated import enough_threads  # noqa: E402

enough_threads()

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Drop the compiled programs of a finished test file. Tests compile thousands of small programs, each of which holds
    several memory maps, and XLA crashes beyond the system's limit for a process (65,530)."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def real_data() -> pathlib.Path:
    """The folder of optional real data (JAXALIGN_TEST_DATA, default ../shared/data); skips the test if it does not exist."""
    default = pathlib.Path(__file__).resolve().parents[1].parent / "shared" / "data"
    folder = pathlib.Path(os.environ.get("JAXALIGN_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip("real data is absent; set JAXALIGN_TEST_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def done(tmp_path_factory) -> pathlib.Path:
    """The work directory of a finished run on one device. Tests read it and must not change it."""
    workdir = tmp_path_factory.mktemp("run")
    from tests.small_run import run

    run(workdir)
    return workdir
