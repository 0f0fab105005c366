"""The command line in several processes: a run ends as in one process on the same mesh, and errors are reported immediately."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import time

import numpy as np
import pytest

from jaxalign import train
from jaxalign.tracking.metrics import read_metrics
from tests import processes
from tests.unchecked import unchecked

pytestmark = pytest.mark.process

MESH = ["--config.mesh.data=2", "--config.mesh.fsdp=4"]
STAGES = ("pretrain", "ppo", "evaluate", "report")
# Small, but with everything that processes do together: training, sampling, a user's callable, checks, shards, the report.
CONFIG = {
    "compile_cache": None,
    "stages": STAGES,
    "data": {"source": "arithmetic"},
    "arithmetic": {"largest": 9, "examples": 200},
    "model": {"layers": 1, "embed": 16, "mlp": 32, "heads": 2, "kv_heads": 2, "head_dim": 8, "max_length": 64},
    "pretrain": {"steps": 4, "batch_rows": 8, "row_length": 32, "checkpoint_every": 2,
                 "optimizer": {"learning_rate": 2e-2, "warmup_steps": 2, "schedule": "constant"}},
    "reward": {"source": "callable"},
    # With the KL in the reward, equal scores of a group would differ only by rounding, which grpo would then normalise.
    "ppo": {"iterations": 2, "advantages": "grpo", "group_size": 4, "batch": 8, "minibatches": 1, "epochs": 1, "prompts": 8,
            "max_new_tokens": 4, "checkpoint_every": 1, "kl_in": "loss", "kl_estimator": "k3"},
    "evaluate": {"prompts": 8, "batch": 8, "max_new_tokens": 4, "examples": 2},
}
REWARD = """
import pathlib, os
def digits(prompts, responses, **columns):
    with open(pathlib.Path(__file__).with_name("calls"), "a") as file:
        file.write(f"{os.getpid()} {len(prompts)} {len(responses)} {len(columns['prompt_id'])}\\n")
    return [sum(letter.isdigit() for letter in text) / 3 for text in responses]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> pathlib.Path:
    """A folder with a config file and a reward."""
    folder = tmp_path_factory.mktemp("many")
    for place in (folder, folder / "early"):
        place.mkdir(exist_ok=True)
        (place / "reward.py").write_text(REWARD)
    config = CONFIG | {"reward": CONFIG["reward"] | {"callable": f"{folder / 'reward.py'}:digits"}}
    (folder / "small.py").write_text(
        "from jaxalign.config import default_config\n"
        f"def get_config():\n    config = default_config()\n    config.update({config!r})\n    return config\n"
    )
    return folder


def command(made: pathlib.Path, *more: str) -> list[str]:
    return ["-m", "jaxalign.train", f"--config={made / 'small.py'}", *more]


# The command line, whose processes then go on with other runs, because the start of processes and their programs take most of
# the time: one with the same first stage in which the reward is called during sampling, the finished run of one process, the
# same with another config, and at last one that trains until it gets a signal.
MORE = """
from jaxalign import interrupts
interrupts.install()
import dataclasses, pathlib, shutil, sys
from jaxalign import pipeline, train
from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.rollout import layouts

run, layouts.SHARES, layouts.SMALLER = pipeline.run, (1,), 1

def several(config, workdir, overwrite):
    run(config, workdir, overwrite)
    folder = pathlib.Path(workdir).parent
    hosts.once(lambda: str(shutil.copytree(folder / "run-2" / "pretrain", folder / "early" / "run" / "pretrain")))
    reward = dataclasses.replace(config.reward, while_sampling=True, callable=f"{folder / 'early' / 'reward.py'}:digits")
    run(dataclasses.replace(config, stages=("pretrain", "ppo"), reward=reward), folder / "early" / "run", overwrite)
    print("FINISHED RUN:", flush=True)
    run(config, folder / "run-1", overwrite)
    try:
        run(dataclasses.replace(config, seed=1), folder / "run-1", overwrite)
    except UserError as error:
        print("REFUSED:", error, file=sys.stderr, flush=True)
    pretrain = dataclasses.replace(config.pretrain, steps=100_000, checkpoint_every=100_000)
    run(dataclasses.replace(config, stages=("pretrain",), pretrain=pretrain), folder / "ended", overwrite)

pipeline.run = several
sys.exit(train.main(sys.argv))
"""
# What is refused at the start: first a placement, which only the first process checks; then another config in the second
# process, which then follows the first one; at last another work directory in the second process, which ends both.
REFUSED = """
import dataclasses, sys
from jaxalign import pipeline, train
from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.pipeline import running
from jaxalign.storage import LocalStorage

run, running._VISIBLE_SECONDS = pipeline.run, 0.5

def several(config, workdir, overwrite):
    try:
        run(config, workdir, overwrite)
    except UserError as error:
        print("PLACEMENT:", error, file=sys.stderr, flush=True)
    config = dataclasses.replace(config, placement=type(config.placement)())
    try:
        running._check_alike(dataclasses.replace(config, seed=hosts.index()), LocalStorage(workdir))
    except UserError as error:
        print("CONFIG:", error, file=sys.stderr, flush=True)
        hosts.wait()
        hosts.once(lambda: None)
    run(config, workdir / str(hosts.index()), overwrite)

pipeline.run = several
sys.exit(train.main(sys.argv))
"""
LONG = ["--config.stages=pretrain", "--config.pretrain.steps=100_000", "--config.pretrain.checkpoint_every=100_000"]


def trained(running, workdir: pathlib.Path, seconds: float = 100.0) -> bool:
    """Waits until a run has recorded some steps. Returns whether it has. JAX waits 120 seconds for a process that does not
    start its devices."""
    until = time.monotonic() + seconds
    metrics = workdir / "pretrain" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 5):
        if time.monotonic() > until or any(process.poll() is not None for process in running):
            return False
        time.sleep(0.2)
    return True


@pytest.fixture(scope="module")
def runs(made, few_sampling_programs):
    """By number of processes: the work directory, the result of each process, and the lines that the reward wrote. The single
    process is this one, and leaves out the checks before the first update. Of two processes, the second gets SIGTERM in the
    last run."""
    found = {}
    for count in (1, 2):
        workdir = made / f"run-{count}"
        words = command(made, f"--workdir={workdir}", *MESH)[1:]
        if count == 1:
            with unchecked():
                ended = train.main(words)
        else:
            with processes.started(2, ["-c", MORE, *words[1:]]) as running:
                if trained(running, made / "ended", 600):
                    running[1].send_signal(signal.SIGTERM)
                ended = processes.ends(running, timeout=120)
            assert [one.code for one in ended] == [143, 143], "\n".join(one.err[-3000:] for one in ended)
        found[count] = workdir, ended, (made / "calls").read_text().splitlines()
        (made / "calls").unlink()
    return found


def read(path: pathlib.Path):
    return json.loads(path.read_text(encoding="utf-8"))


def rows(workdir: pathlib.Path, stage: str) -> list[dict]:
    return [json.loads(line) for path in sorted((workdir / stage).glob("rows-*.jsonl")) for line in open(path)]


@pytest.mark.slow
def test_one_and_two_processes_write_the_same_files(runs):
    def names(workdir):
        kinds = (".json", ".jsonl", ".html", ".model")
        own = [path.relative_to(workdir) for path in workdir.rglob("*") if path.suffix in kinds]
        return {str(path) for path in own if not {"checkpoints", "params", "system.jsonl"} & set(path.parts)}

    assert names(runs[1][0]) | {"ppo/checks.json"} == names(runs[2][0]) and "report.html" in names(runs[1][0])
    for stage in STAGES:
        one, two = (read(runs[count][0] / stage / "manifest.json") for count in (1, 2))
        assert two.pop("outputs").keys() - one.pop("outputs").keys() <= {"checks.json"}
        assert one == two  # Other meshes round differently.
        assert read(runs[2][0] / stage / "manifest.json")["status"] == "done"


@pytest.mark.slow
def test_the_checks_before_the_first_update_pass_in_two_processes(runs):
    checks = read(runs[2][0] / "ppo" / "checks.json")
    assert len(checks) == 5 and all(check["passed"] for check in checks)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["pretrain", "ppo"])
def test_metrics_agree_to_rounding(runs, stage):
    expected, found = (read_metrics(runs[count][0] / stage / "metrics.jsonl") for count in (1, 2))
    assert [row["step"] for row in found] == [row["step"] for row in expected] and len(found) in (2, 4)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, rtol=1e-5, atol=5e-6, err_msg=name)


@pytest.mark.slow
def test_one_and_two_processes_sample_the_same_responses(runs):
    expected, found = (rows(runs[count][0], "evaluate") for count in (1, 2))
    fields = ("model", "prompt_id", "response", "tokens", "gold", "complete")
    assert [[row[name] for name in fields] for row in found] == [[row[name] for name in fields] for row in expected]
    assert len(found) == 16
    assert any(row["response"] for row in found)
    np.testing.assert_allclose([row["kl"] for row in found], [row["kl"] for row in expected], rtol=1e-3, atol=1e-5)
    assert read(runs[2][0] / "evaluate" / "summary.json")["length"] == read(runs[1][0] / "evaluate" / "summary.json")["length"]


@pytest.mark.slow
def test_a_users_reward_is_called_once_for_all_rows(runs):
    for _, _, calls in runs.values():
        # Once in each iteration, and for the answers of each of two models in evaluate.
        assert len(calls) == CONFIG["ppo"]["iterations"] + 2 and len({line.split()[0] for line in calls}) == 1
        assert {line.split(" ", 1)[1] for line in calls} == {"8 8 8"}


@pytest.mark.slow
def test_a_reward_called_during_sampling_also_runs_in_one_process(made, runs):
    calls = [line.split() for line in (made / "early" / "calls").read_text().splitlines()]
    assert len({process for process, *_ in calls}) == 1 and sum(int(count) for _, count, *_ in calls) == 16
    found, expected = (read_metrics(folder / "ppo" / "metrics.jsonl") for folder in (made / "early" / "run", runs[2][0]))
    assert [row["score"] for row in found] == pytest.approx([row["score"] for row in expected])


@pytest.mark.slow
def test_only_the_first_process_prints(runs):
    first, second = runs[2][1]
    assert first.out.splitlines()[0] == "[pretrain] starting" and "Report: " in first.out
    assert "[ppo] finished 2/2 steps" in first.err
    said, marker, _ = second.err.partition("REFUSED:")
    assert marker and "[" + "pretrain]" not in second.out + said and "Report" not in second.out


@pytest.mark.slow
def test_a_finished_run_is_reported_as_done(runs):
    first, second = runs[2][1]
    _, marker, printed = first.out.partition("FINISHED RUN:\n")
    assert marker and printed.splitlines()[: len(STAGES)] == [f"[{stage}] done, nothing to compute" for stage in STAGES]
    # The library that connects processes prints such lines. Its threads may mix them.
    line = "[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    assert set(re.findall("[A-Za-z]+", second.out)) <= set(re.findall("[A-Za-z]+", line))


@pytest.fixture(scope="module")
def refused(made):
    """The work directory and the results of two processes that run REFUSED."""
    workdir = made / "refused"
    words = command(made, f"--workdir={workdir}", *MESH, "--config.placement.strategy=interleave")
    return workdir, processes.run(2, ["-c", REFUSED, *words[2:]])


def test_another_config_in_one_process_is_refused(refused):
    _, (first, second) = refused
    assert "CONFIG: this process's config differs from process 0's" in second.err and "CONFIG:" not in first.err


def test_a_work_directory_that_is_not_shared_is_refused(refused):
    workdir, (first, second) = refused
    assert (first.code, second.code) == (2, 2)
    problem = f"the work directory {workdir / '1'} is not that of process 0"
    assert f"process 1: {problem}" in second.err and f"process 0 ends because process 1 did: {problem}" in first.err
    assert not list(workdir.rglob("manifest.json"))


@pytest.mark.slow
def test_all_processes_report_an_error_of_the_first(runs):
    for one in runs[2][1]:
        _, marker, said = one.err.partition("REFUSED:")
        assert marker and "has stages that were run with a different config" in said


def test_a_placement_is_refused_before_the_devices_are_started(refused):
    """Only the first process checks it. If it started the devices for that, it would wait 120 seconds for the other."""
    for one in refused[1]:
        assert one.seconds < 100
        assert "PLACEMENT: placement interleave needs one process, but this run has 2" in one.err


@pytest.mark.slow
def test_after_sigterm_to_one_process_all_save_a_checkpoint_at_one_step(made, runs):
    found, stage = runs[2][1], made / "ended" / "pretrain"
    assert [one.code for one in found] == [143, 143] and found[0].seconds < 30
    assert not any("Traceback" in one.err for one in found)
    steps = [int(path.name) for path in (stage / "checkpoints").iterdir() if path.name.isdigit()]
    assert steps == [len(read_metrics(stage / "metrics.jsonl"))]


@pytest.mark.slow
def test_if_a_process_is_killed_in_training_the_other_says_so_in_one_sentence(made):
    """The first process, which has JAX's coordination service. `parallel/test_hosts.py` kills each of several processes."""
    workdir = made / "killed"
    with processes.started(2, command(made, f"--workdir={workdir}", *MESH, *LONG)) as running:
        assert trained(running, workdir)
        running[0].kill()
        _, other = processes.ends(running, timeout=120)
    assert other.code == 1 and other.seconds < 20
    assert "process 1 ends because process 0 did: it was killed, or its host was lost" in other.err.splitlines()
    assert "Traceback" not in other.err and "external/xla" not in other.err
