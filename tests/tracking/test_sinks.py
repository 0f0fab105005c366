"""The built-in trackers have every step once despite kills; replay sends only what is missing; secrets stay here."""

from __future__ import annotations

import json
import logging
import math
import os
import pathlib
import signal
import subprocess
import sys

import pytest

import jaxalign as ja
from jaxalign import pipeline, track
from jaxalign.config import TrackingConfig, from_config_dict
from jaxalign.errors import UserError
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.sinks import mlflow
from jaxalign.tracking.sinks.attachments import read_attachments, read_results
from jaxalign.tracking.sinks.base import plain_settings
from jaxalign.tracking.sinks.identity import identify
from jaxalign.tracking.tracker import Trackers, make_trackers
from tests.tracking import killed_run, tracked

LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
ROW = {"loss": 0.5, "kl/last": math.inf}
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    if "trackio" not in sys.modules:  # It reads the variable when it is imported.
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def log(directory, name, first, last, **config):
    trackers = make_trackers((name,))
    with Trackers("ppo", directory, trackers, {"workdir": str(directory.parent), **config}, first) as active:
        for step in range(first, last):
            active.log(step, ROW | {"loss": step / 2})


def write_stage(workdir, name="evaluate", **manifest):
    """A finished stage with three generated rows and a summary."""
    folder = workdir / name
    folder.mkdir(parents=True)
    (workdir / "config.json").write_text('{"stages": ["evaluate"], "seed": 3}')
    (folder / "manifest.json").write_text(json.dumps({"status": "done"} | manifest))
    rows = [{"model": "ppo", "messages": [{"role": "user", "content": f"Q{i}"}], "response": "ab" * i, "tokens": i}
            for i in range(3)]
    (folder / "rows-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text('{"seed": 3, "rates": {"ppo": {"helpful": {"count": 1, "rate": 0.25, "low": 0.1}}}}')
    return folder


def test_tensorboard_skips_what_its_files_have_and_repeats_what_they_lack(tmp_path):
    """The files lose their end in a kill: the last complete step counts, whatever the process had logged."""
    pytest.importorskip("tensorboardX")
    log(tmp_path / "run" / "ppo", "tensorboard", 0, 5)
    (path,) = tmp_path.rglob("events.out.tfevents.*")
    path.write_bytes(path.read_bytes()[:-10])
    log(tmp_path / "run" / "ppo", "tensorboard", 2, 6)
    rows = tracked.tensorboard(tmp_path)
    assert rows == [(step, {"loss": step / 2, "kl/last": math.inf}) for step in range(6)]
    assert not (tmp_path / "run" / "ppo" / "trackers.json").exists()


def test_a_replay_sends_results_samples_and_histograms_once(tmp_path, capsys):
    pytest.importorskip("tensorboardX")
    write_stage(tmp_path / "run")
    command = ["track", f"--workdir={tmp_path / 'run'}", "--to=tensorboard", "--group=mine"]
    assert track.main(command) == 0 and "1 steps and 3 attachments sent" in capsys.readouterr().out
    assert track.main(command) == 0 and "0 steps and 0 attachments sent" in capsys.readouterr().out
    assert tracked.tensorboard(tmp_path) == [(0, {"rates/ppo/helpful/rate": 0.25})]
    tags = tracked.tensorboard_tags(tmp_path)
    assert {"samples/text_summary", "histogram/tokens/ppo", "histogram/response_characters/ppo"} <= set(tags)
    assert len(tags) == len(set(tags))


def test_attachments_are_spread_over_the_rows(tmp_path):
    attached = read_attachments(write_stage(tmp_path / "run"), 2)
    assert attached.columns == ("model", "prompt", "response", "tokens")
    assert attached.rows == (("ppo", "Q0", "", 0), ("ppo", "Q1", "ab", 1))
    assert attached.histograms == {"histogram/tokens/ppo": [0, 1, 2], "histogram/response_characters/ppo": [0, 2, 4]}
    assert read_results(tmp_path / "run" / "evaluate") == {"rates/ppo/helpful/rate": 0.25}


def test_the_id_of_a_run_stays_in_its_folder(tmp_path):
    workdir = tmp_path / "runs" / "one"
    folder = workdir / "round-2" / "ppo"
    config = {"stage": "ppo, round 2", "directory": str(folder), "workdir": str(workdir)}
    first = identify(config, TrackingConfig())
    assert (first.group, first.stage, first.files) == ("one", "round-2/ppo", workdir / "trackers")
    assert identify(config, TrackingConfig()) == first
    (folder / "tracker_run.json").write_text('{"id": "../../etc"')
    assert identify(config, TrackingConfig()).id != first.id


@pytest.mark.parametrize(("field", "value", "secret"), [
    ("project", KEY, "an API key"), ("group", "https://me:pass@host/x", "a password in a URL"),
    ("tags", ("wandb_api_key=abc",), "an API key"), ("directory", "/data/secret-of-mine-7", "WANDB_API_KEY"),
    ("trackers", (f"wandb-{KEY}",), "an API key"),
])
def test_a_config_with_a_secret_is_refused_without_repeating_it(monkeypatch, field, value, secret):
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-mine-7")
    with pytest.raises(UserError, match=rf"config\.tracking\.{field} contains .*{secret}") as raised:
        from_config_dict({"tracking": {"trackers": ("tensorboard",), field: value}})
    assert (value if isinstance(value, str) else value[0]) not in str(raised.value)


def test_settings_are_sent_without_secrets(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct-horse")
    config = {"model": {"path": "https://u:p@h/m", "layers": 2}, "note": f"correct-horse {KEY}", "tags": ["a"], "step": 4}
    sent = plain_settings(config)
    assert sent == {"model.path": "https://h/m", "model.layers": 2, "note": "[MLFLOW_TRACKING_PASSWORD] [key]", "tags": '["a"]'}


def test_a_store_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    pytest.importorskip("tensorboardX")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trackers").write_text("a file where a folder is expected")
    with caplog.at_level(logging.WARNING, "jaxalign"):
        log(tmp_path / "run" / "ppo", "tensorboard", 0, 3)
    assert len(caplog.messages) == 1 and "failed in start (NotADirectoryError" in caplog.text
    assert len(read_metrics(tmp_path / "run" / "ppo" / "metrics.jsonl")) == 3


def test_names_for_mlflow_have_no_empty_parts():
    """The judge of your own writes "position": {"": 2.0}."""
    names = ("loss", "calibration/position/", "a//b", "./..", "rates/P(a)")
    assert [mlflow._named((name, 1.0))[0] for name in names] == [
        "loss", "calibration/position/_", "a/_/b", "_/_", "rates/P_a_"]


def test_python_makes_a_tracker_with_settings(tmp_path):
    pytest.importorskip("tensorboardX")
    with Trackers("SFT", tmp_path / "run", [ja.tracker("tensorboard", group="mine", directory=str(tmp_path))]) as active:
        active.log(0, {"loss": 0.25})
    assert tracked.tensorboard(tmp_path / "tensorboard" / "mine") == [(0, {"loss": 0.25})]
    with pytest.raises(UserError, match="did you mean project?"):
        ja.tracker("wandb", projekt="x")
    with pytest.raises(UserError, match="project contains what looks like an API key"):
        ja.tracker("wandb", project=KEY)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_second_replay_sends_no_results_samples_or_report_again(tmp_path, capsys, name):
    pytest.importorskip(LIBRARIES[name])
    write_stage(tmp_path / "run")
    write_stage(tmp_path / "run", "report")
    (tmp_path / "run" / "report.html").write_text("<html></html>")
    command = ["track", f"--workdir={tmp_path / 'run'}", f"--to={name}"]
    for sent in ("1 steps and 3 attachments sent", "0 steps and 0 attachments sent"):
        assert track.main(command) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("run/")]
        assert len(lines) == 2 and sent in lines[0] and sent.replace("3", "4") in lines[1]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--to=wandb"], "--workdir is not given"),
    (["--workdir=.", "--to=wandb"], "has no config.json"),
    (["--workdri=.", "--to=wandb"], "did you mean --workdir?"),
    (["--workdir={run}", "--to=wand"], "did you mean wandb?"),
    (["--workdir={run}", "--to=wandb", f"--project={KEY}"], "project contains what looks like an API key"),
    (["--workdir={run}", "--to=tensorboard", "--samples=x"], "--samples is 'x'"),
    (["--workdir={broken}", "--to=tensorboard"], "metrics.jsonl, line 1 is not JSON"),
])
def test_a_mistake_in_a_replay_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_stage(tmp_path / "run")
    (write_stage(tmp_path / "broken", status="running") / "metrics.jsonl").write_text('{"step": 0, "loss"\n')
    places = {"run": tmp_path / "run", "broken": tmp_path / "broken"}
    assert track.main(["track", *(argument.format(**places) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error and KEY not in error and len(error.splitlines()) == 1


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_run_has_every_step_once_in_all_trackers_and_a_replay_is_equal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")  # A busy machine needs longer than 30 s to start the process of wandb.
    for library in LIBRARIES.values():
        pytest.importorskip(library)
    from trackio import utils

    run, later = tmp_path / "killed", tmp_path / "later"
    root = pathlib.Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "TRACKIO_DIR": str(utils.TRACKIO_DIR)}
    environment.pop("WANDB_SERVICE", None)  # A process of wandb that earlier tests started would keep the killed run open.
    program, names = [sys.executable, killed_run.__file__, str(run), ",".join(LIBRARIES)], tuple(LIBRARIES)
    assert subprocess.run(program, env=environment, capture_output=True).returncode == -signal.SIGKILL
    database = pathlib.Path(utils.TRACKIO_DIR) / "jaxalign.db"
    pipeline.run(killed_run.config(names), run)
    pipeline.run(killed_run.config(), later)
    files = run / "trackers"
    for name in names:
        assert track.main(["track", f"--workdir={later}", f"--to={name}", f"--directory={files}"]) == 0, capsys.readouterr().err
        assert track.main(["track", f"--workdir={run}", f"--to={name}"]) == 0, capsys.readouterr().err
    rows = read_metrics(run / "pretrain" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(10))
    expected = [(row.pop("step"), row) for row in rows]
    for group in ("killed", "later"):
        single = [(step, pytest.approx(row, rel=1e-6)) for step, row in expected]  # Event files contain 32-bit floats.
        assert tracked.tensorboard(files / "tensorboard" / group) == single
        assert tracked.wandb(files, group) == tracked.mlflow(files, group) == tracked.trackio(database, group) == expected
