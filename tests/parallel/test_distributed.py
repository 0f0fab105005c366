"""The process group of a run: from flags, JAX's variables, or the launcher."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxalign.errors import UserError
from jaxalign.parallel.distributed import ProcessGroup, find, take_flags
from tests.processes import ROOT

# Variables as the launchers set them (Slurm's srun; mpirun of Open MPI 4.1 and 5.0; TPU pods on GKE).
SLURM = {"SLURM_JOB_ID": "4242", "SLURM_STEP_NODELIST": "node[003-006]", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
         "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
       "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPI_4 = MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
GKE = {"TPU_WORKER_HOSTNAMES": "job-0.svc,job-1.svc", "TPU_WORKER_ID": "1", "TPU_SKIP_MDS_QUERY": "true"}


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """No launcher, whatever started the tests."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMIX_", "TPU_", "MEGASCALE_", "KUBERNETES_", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)
    for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)


def under(monkeypatch, environment, given=None):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return find(given or ProcessGroup())


def test_flags_of_the_process_group_are_removed_from_the_others():
    group, rest = take_flags(["--config=a.py", "--coordinator=h:1", "--processes", "4", "-process=3", "--workdir", "w"])
    assert group == ProcessGroup("h:1", 4, 3)
    assert rest == ["--config=a.py", "--workdir", "w"]
    assert take_flags(["--start_timeout=7.5"])[0].timeout == 7.5
    assert take_flags(["--config.ppo.batch=3"]) == (ProcessGroup(), ["--config.ppo.batch=3"])


@pytest.mark.parametrize(("flags", "said"), [
    (["--coordinator=node"], "--coordinator is 'node'; HOST:PORT is expected"),
    (["--coordinator=node:http"], "HOST:PORT is expected"),
    (["--coordinator=node:70000"], "HOST:PORT is expected"),
    (["--coordinator="], "--coordinator is ''"),
    (["--processes=0"], "--processes is '0'; a whole number of at least 1 is expected"),
    (["--processes=two"], "--processes is 'two'"),
    (["--process=-1"], "--process is '-1'; a whole number of 0 or above is expected"),
    (["--process"], "--process is ''"),
    (["--processes=4", "--process=4"], "--process is 4, but --processes is 4: processes are numbered from 0 to 3"),
    (["--start_timeout=0"], "--start_timeout is '0'; a number of seconds above 0 is expected"),
])
def test_wrong_flags_are_refused(flags, said):
    with pytest.raises(UserError, match=said.replace("(", "[(]")):
        take_flags(flags)


@pytest.mark.parametrize("flags", [
    ["--coordinator=h:1"], ["--processes=2"], ["--process=0"], ["--coordinator=h:1", "--processes=2"],
    ["--processes=2", "--process=1"],
])
def test_incomplete_flags_are_refused_and_the_missing_ones_are_named(flags):
    missing = [name for name in ("coordinator", "processes", "process") if not any(f"{name}=" in flag for flag in flags)]
    with pytest.raises(UserError, match=f"but not {' and '.join('--' + name for name in missing)}: give --coordinator"):
        find(take_flags(flags)[0])


def test_without_flags_and_variables_there_is_one_process():
    assert find(ProcessGroup()) is None
    assert find(ProcessGroup(processes=1)) is None


def test_jaxs_own_variables(monkeypatch):
    found = {"JAX_COORDINATOR_ADDRESS": "h:9", "JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "5"}
    assert under(monkeypatch, found) == ProcessGroup("h:9", 8, 5)
    assert find(ProcessGroup("other:1", None, 7)) == ProcessGroup("other:1", 8, 7)  # Flags take precedence.
    assert find(ProcessGroup(processes=1)) is None
    monkeypatch.setenv("JAX_PROCESS_ID", "eight")
    with pytest.raises(UserError, match="JAX_PROCESS_ID is 'eight'"):
        find(ProcessGroup())


def test_slurm(monkeypatch):
    """JAX uses the first host, and a port from 61440 on that depends on the job id."""
    assert under(monkeypatch, SLURM) == ProcessGroup(f"node003:{61440 + 4242 % 4096}", 4, 2)


def test_slurm_with_one_task_per_gpu(monkeypatch):
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}
    assert under(monkeypatch, SLURM | tasks).devices == (1,)


@pytest.mark.parametrize("environment", [
    SLURM | {"SLURM_NTASKS": "1"}, {"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
])
def test_one_task_or_a_batch_script_without_srun_is_one_process(monkeypatch, environment):
    assert under(monkeypatch, environment) is None


def test_open_mpi_4(monkeypatch):
    """JAX's rule: mpirun's first address, and a port that depends on the job id."""
    port = 61440 + 1531576320 // 4096 % 4096
    assert under(monkeypatch, MPI_4) == ProcessGroup(f"10.96.0.1:{port}", 4, 3, devices=(1,))


def test_open_mpi_5_on_one_host(monkeypatch):
    here = MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "PMIX_NAMESPACE": "prterun-node-7@1"}
    found = under(monkeypatch, here)
    assert (found.processes, found.process, found.devices) == (4, 3, (3,))
    host, port = found.coordinator.split(":")
    assert host == "localhost" and 61440 <= int(port) < 65536
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert find(ProcessGroup()).coordinator == found.coordinator
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-node-8@1")
    assert find(ProcessGroup()).coordinator != found.coordinator


def test_open_mpi_5_on_several_hosts_needs_the_coordinator(monkeypatch):
    with pytest.raises(UserError, match="Open MPI provides --processes, --process, but not --coordinator: give --coordinator"):
        under(monkeypatch, MPI)
    assert find(ProcessGroup("first:1234")) == ProcessGroup("first:1234", 4, 3, devices=(1,))


def test_inside_a_slurm_job_the_variables_of_open_mpi_are_used(monkeypatch):
    """The processes of mpirun inherit the variables of the Slurm step in which its daemon runs."""
    assert under(monkeypatch, SLURM | MPI_4).process == 3


def test_a_tpu_pod_on_gke(monkeypatch):
    from jax._src.clusters import cloud_tpu_cluster

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster.BaseTpuCluster, "wait_for_coordinator", lambda *_: None)
    monkeypatch.setattr(cloud_tpu_cluster, "get_tpu_env_value_from_metadata", lambda key: None)
    assert under(monkeypatch, GKE | {"JAX_PLATFORMS": "tpu,cpu"}) == ProcessGroup("job-0.svc:8482", 2, 1)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    assert find(ProcessGroup()) is None  # A single host.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert find(ProcessGroup()) is None


def test_variables_that_jax_cannot_read_are_reported(monkeypatch):
    with pytest.raises(UserError, match="JAX cannot read it .*--processes=1 for a single process"):
        under(monkeypatch, SLURM | {"SLURM_NTASKS": "four"})


@pytest.mark.process
def test_the_command_reports_a_wrong_flag_immediately():
    for module, flag in (("train", "--processes=0"), ("sample", "--process=x"), ("convert", "--coordinator=here")):
        done = subprocess.run([sys.executable, "-m", f"jaxalign.{module}", flag], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith(flag.partition("=")[0]) and done.stderr.count("\n") == 1


@pytest.mark.process
def test_a_coordinator_that_does_not_answer_ends_the_run_after_the_timeout(tmp_path):
    (tmp_path / "small.py").write_text("from jaxalign.config import default_config as get_config\n")
    command = ["-m", "jaxalign.train", f"--config={tmp_path / 'small.py'}", f"--workdir={tmp_path / 'run'}",
               "--coordinator=localhost:9", "--processes=2", "--process=1", "--start_timeout=1"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("process 1 cannot reach process 0 at localhost:9 within 1 s") and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
