"""Settings for all tests: eight CPU devices, a compile cache that outlives the run, no silent broadcasting, and no network.

The environment is set before the first import of JAX, because JAX reads it only once.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import gc
import importlib.metadata
import ipaddress
import os
import pathlib
import shutil
import socket

from tests.processes import COMPILE_FAST

_DEVICES = "--xla_force_host_platform_device_count=8"
_CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jaxalign-tests"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES} {COMPILE_FAST}".strip()
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Eight devices on a busy machine may wait for each other longer than the 40 seconds after which XLA ends the process.
    os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=240"
# Set by environment variables, so that child processes of tests share the cache.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
# Store every program: most compile in less than 0.2 seconds, and many test files compile the same ones.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Leave source lines out of lowered programs, which saves 7% of the time. Tracebacks of errors do not need them.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# On some virtual machines page faults are expensive. The C library reads this when a worker or a child process starts.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
# Hugging Face libraries, here and in child processes, read only local files.
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

from jaxalign.parallel.simulated import enough_threads  # noqa: E402

enough_threads()

import filelock  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing makes millions of objects that live long; with Python's thresholds, 8% of the time is garbage collection.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish():
    """Leave the modules of all tests out of later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items):
    """Mark tests whose path, name or parameter says that they run on a mesh, those that use a server process or the finished
    run, and the variants that are slow. A variant that is selected by its node id counts as one of the first."""
    variants = collections.Counter()
    for item in items:
        kept = item.get_closest_marker("variants")
        if kept is not None:
            variants[item.function] += 1
            if variants[item.function] > kept.args[0]:
                item.add_marker(pytest.mark.slow)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("mesh", "mesh" in item.nodeid):
            item.add_marker(pytest.mark.mesh)
        if "tiny_server" in item.fixturenames:
            item.add_marker(pytest.mark.process)
        if "done" in item.fixturenames:
            item.add_marker(pytest.mark.medium)


@pytest.fixture(scope="session", autouse=True)
def _no_network():
    """Behave like a machine without a network: only addresses of this machine can be looked up and connected to."""
    with pytest.MonkeyPatch.context() as patch:
        connect, connect_ex, getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo
        refused = "tests must not use the network"

        def is_local(host) -> bool:
            try:
                return not host or host in ("localhost", socket.gethostname()) or ipaddress.ip_address(host).is_loopback
            except ValueError:  # another name
                return False

        def guarded_connect(self, address):
            if self.family != socket.AF_UNIX and not is_local(address[0]):
                raise OSError(errno.ENETUNREACH, f"{refused}: connect to {address}")
            return connect(self, address)

        def guarded_connect_ex(self, address):
            if self.family != socket.AF_UNIX and not is_local(address[0]):
                return errno.ENETUNREACH
            return connect_ex(self, address)

        def guarded_getaddrinfo(host, *arguments, **options):
            name = host.decode() if isinstance(host, bytes) else host
            if not is_local(name):
                raise socket.gaierror(socket.EAI_NONAME, f"{refused}: look up {name}")
            return getaddrinfo(host, *arguments, **options)

        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
        patch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)
        yield


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Drop the compiled programs of a finished test file. Tests compile thousands of small programs: each holds several memory
    maps, of which a process may have 65,530, and a worker that keeps those of all files needs 6 GB. Keeping them saves no time:
    other files use few of them, and every later garbage collection scans them."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def two_layers():
    """Give the tiny model two layers."""
    from tests import tiny

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "DECODER", dataclasses.replace(tiny.DECODER, layers=2))
        yield


@pytest.fixture(scope="module")
def few_sampling_programs():
    """See `few_programs.sample_with_few_programs`."""
    from tests.few_programs import sample_with_few_programs

    with pytest.MonkeyPatch.context() as patch:
        sample_with_few_programs(patch)
        yield


@pytest.fixture(scope="module")
def no_checks_of_step_zero():
    """Leave out the checks before the first update of RL, as `ppo.checks.step_zero=False` does, in code that a test runs
    unchanged. Their program takes the longest to compile; the tests of `rl/` and of other runs cover them."""
    from tests.unchecked import unchecked

    with unchecked():
        yield


@pytest.fixture(scope="session")
def real_data() -> pathlib.Path:
    """The folder of optional real data (JAXALIGN_TEST_DATA, default ../shared/data); skips the test if it does not exist."""
    default = pathlib.Path(__file__).resolve().parents[1].parent / "shared" / "data"
    folder = pathlib.Path(os.environ.get("JAXALIGN_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip("real data is absent; set JAXALIGN_TEST_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def done(tmp_path_factory, worker_id) -> pathlib.Path:
    """The work directory of a finished run on one device. Tests read it and must not change it.

    The first worker of pytest-xdist that needs it makes it; each worker has its own copy.
    """
    from tests.small_run import run

    workdir = tmp_path_factory.mktemp("run")
    if worker_id == "master":
        run(workdir)
        return workdir
    shared = tmp_path_factory.getbasetemp().parent / "shared_run"
    with filelock.FileLock(f"{shared}.lock"):
        if not shared.exists():
            run(workdir)
            shutil.copytree(workdir, shared.with_name("shared_run_copy"))
            shared.with_name("shared_run_copy").rename(shared)  # A copy that was interrupted is not used.
            return workdir
    shutil.copytree(shared, workdir, dirs_exist_ok=True)
    (workdir / ".lock").write_text(str(os.getpid()))  # As if this worker had made the run.
    return workdir
