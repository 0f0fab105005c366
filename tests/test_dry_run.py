"""`train --dry-run`: the plan of stages, the checks of a run, and no change of any file."""

from __future__ import annotations

import json
import shutil

import pytest

from jaxalign import pipeline, train
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from tests.folders import write_model
from tests.small_run import CONFIG, fingerprints


def plan(capsys, workdir, overwrite: bool = False, **changes) -> list[str]:
    """Return the printed lines; check that no file changes."""
    before = fingerprints(workdir)
    pipeline.dry_run(from_config_dict(CONFIG | changes), workdir, overwrite)
    assert fingerprints(workdir) == before
    return capsys.readouterr().out.splitlines()


def test_stages_that_were_never_run_start(tmp_path, capsys):
    lines = plan(capsys, tmp_path / "new")
    assert lines[:2] == ["[pretrain] would start", "[revise] would start; reads pretrain"]
    assert lines[2] == "[sft] would start; reads pretrain; revise"
    assert lines[-1] == f"8 of 8 stages would run in {tmp_path / 'new'}; nothing was run or written"
    assert not (tmp_path / "new").exists()


def test_finished_stages_are_done(done, capsys):
    lines = plan(capsys, done)
    assert lines[0] == "[pretrain] done" and lines[-1] == f"0 of 8 stages would run in {done}; nothing was run or written"


def test_changed_stages_are_refused_or_start_again(done, capsys):
    section = CONFIG["ppo"] | {"kl_coef": 0.07}
    with pytest.raises(UserError, match=r"\[ppo\] config.ppo.kl_coef was 0.05 and is 0.07"):
        plan(capsys, done, ppo=section)
    lines = plan(capsys, done, overwrite=True, ppo=section)
    assert "[ppo] would start again (the old folder would become ppo.old-N); reads sft; preference" in lines
    assert lines[-1].startswith("3 of 8 stages")


def test_an_interrupted_stage_continues(done, tmp_path, capsys):
    workdir = shutil.copytree(done, tmp_path / "run")
    manifest = workdir / "report" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"status": "running"}))
    assert plan(capsys, workdir)[-2].startswith("[report] would continue; reads pretrain; revise; ")


def test_later_rounds_and_unread_stages_are_named(tmp_path, capsys):
    lines = plan(capsys, tmp_path / "new", rounds=2)
    assert "[compare, round 2] would start; reads pretrain; sft; ppo" in lines
    lines = plan(capsys, tmp_path / "new", stages=("pretrain", "revise", "compare", "preference", "ppo"))
    assert lines[0].startswith("warning: config.stages has revise, but no stage of this run reads")
    assert lines[-1].startswith("5 of 5 stages")


def test_rates_that_are_too_high_for_the_model_are_named(tmp_path, capsys):
    """32 layers of 16 * 1024^2 weights are 0.54 billion, for which 1e-5 is usual, and 1e-6 in RL."""
    large = CONFIG["model"] | {"embed": 1024, "layers": 32, "mlp": 4096, "heads": 8, "kv_heads": 8, "head_dim": 128}
    optimizers = {"sft": 1e-5, "preference": 1e-3, "ppo": 1e-4}
    sections = {name: CONFIG[name] | {"optimizer": {"learning_rate": rate}} for name, rate in optimizers.items()}
    warned = [line for line in plan(capsys, tmp_path / "new", model=large, **sections) if line.startswith("warning")]
    assert [line.split(", but")[0] for line in warned] == [
        "warning: [preference] the learning rate is 0.001", "warning: [ppo] the learning rate is 0.0001"]
    assert "about 1e-05 is usual for all weights of a model of 0.54 billion" in warned[0] and "about 1e-06" in warned[1]


def refusal(workdir, **changes) -> str:
    with pytest.raises(UserError) as error:
        pipeline.dry_run(from_config_dict(changes), workdir)
    assert not workdir.exists()
    return str(error.value)


def test_the_mesh_is_compared_with_the_devices_and_the_model(tmp_path):
    pretrain = {"stages": ("pretrain",), "model": CONFIG["model"], "mesh": {"context": 16}}
    assert "config.mesh asks for context=16 = 16 devices, but 8 are available" in refusal(tmp_path / "new", **pretrain)
    model = {"source": "huggingface", "path": str(write_model(tmp_path / "model"))}
    own = {"stages": ("revise",), "model": model, "world": {"with_own_model": True}, "mesh": {"tensor": 8}}
    assert "config.mesh.tensor is 8; it must divide the model's " in refusal(tmp_path / "new", **own)


def test_the_files_of_the_data_are_read(tmp_path):
    model = {"source": "huggingface", "path": str(write_model(tmp_path / "model"))}
    file = tmp_path / "pairs.jsonl"
    own = {"stages": ("dpo",), "model": model, "data": {"source": "preferences_jsonl", "train": str(file)}}
    assert f"config.data.train: {file} cannot be read" in refusal(tmp_path / "new", **own)
    file.write_text('{"chosen": 1}\n')
    assert str(file) in refusal(tmp_path / "new", **own)


def test_a_work_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is not a folder"):
        pipeline.dry_run(from_config_dict(CONFIG), tmp_path / "file" / "run")


def test_the_command_has_the_exit_codes_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["train", "--dry-run", "--workdir=new"]) == 0
    assert "8 of 8 stages would run in new" in capsys.readouterr().out
    assert train.main(["train", "--dry-run", "--config.mesh.data=512"]) == 2
    assert list(tmp_path.iterdir()) == []
