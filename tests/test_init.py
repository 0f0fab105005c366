"""`jaxalign init`: from a model's folder to a config that `jaxalign train` runs to its report."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest

from jaxalign import init, train
from jaxalign.feedback.constitution import load_constitution, load_exemplars
from tests import made_tokenizers
from tests.folders import write_model

TEMPLATES = {"base": None, "chatml": made_tokenizers.CHATML, "thinking": made_tokenizers.QWEN3}
# Few prompts and tokens, one principle, requests to the judge one by one, and equal batches: each other shape is another
# program.
SMALL = ("--config.compile_cache=None", "--config.revise.red_team_prompts=6", "--config.revise.helpful_prompts=2",
         "--config.revise.rounds=1", "--config.compare.prompts=4", "--config.ppo.iterations=1", "--config.ppo.prompts=8",
         "--config.evaluate.prompts=4", "--config.evaluate.win_rate_prompts=2", "--config.feedback.share_prefix=False",
         "--config.feedback.principles_per_comparison=1",
         "--config.ppo.checks.step_zero=False",
         *(f"--config.{stage}.{field}" for stage in ("revise", "compare", "ppo", "evaluate")
           for field in ("max_new_tokens=16", "batch=8")))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, pathlib.Path]:
    """Folders of one random model: without a chat template, with a ChatML template, and with that of a reasoning model."""
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, template, 1024) for name, template in TEMPLATES.items()}


def started(folder: pathlib.Path, model: pathlib.Path, *arguments: str) -> int:
    return init.main(["init", str(folder), f"--model={model}", *arguments])


def read_config(folder: pathlib.Path):
    return train.read_arguments(["train", f"--config={folder / 'config.py'}"])[0]


@pytest.mark.parametrize(("kind", "style", "templates", "thinking"), [
    ("base", "hh", "transcript", "auto"), ("chatml", "chat", "chat", "auto"), ("thinking", "chat", "chat", "off"),
])
def test_the_config_suits_the_kind_of_model(models, tmp_path, capsys, kind, style, templates, thinking):
    folder = tmp_path / "own"
    assert started(folder, models[kind], "--nocheck") == 0
    assert sorted(path.name for path in folder.iterdir()) == ["config.py", "constitution.json", "helpful.jsonl",
                                                              "red_team.jsonl"]
    out = capsys.readouterr().out
    assert f"jaxalign train --config={folder}/config.py --workdir={folder}/run" in out
    config = read_config(folder)
    assert config.stages == ("revise", "sft", "compare", "preference", "ppo", "evaluate", "report")
    assert (config.feedback.templates, config.data.thinking, config.feedback.thinking) == (templates, thinking, thinking)
    assert config.model.max_length == 1024 and config.revise.max_new_tokens == 128
    assert config.data.red_team == str(folder / "red_team.jsonl")
    assert len((folder / "config.py").read_text().splitlines()) < 80
    before = sorted(folder.rglob("*"))
    assert train.main(["train", "--dry-run", f"--config={folder}/config.py", f"--workdir={folder}/run"]) == 0
    assert "7 of 7 stages would run" in capsys.readouterr().out and sorted(folder.rglob("*")) == before


def test_only_a_base_model_gets_examples_of_critiques_and_revisions(models, tmp_path):
    for kind in ("base", "chatml"):
        assert started(tmp_path / kind, models[kind], "--nocheck") == 0
        assert len(load_constitution(tmp_path / kind / "constitution.json")) == 7
    assert len(load_exemplars(tmp_path / "base" / "constitution.json")) == 2
    assert load_exemplars(tmp_path / "chatml" / "constitution.json") == ()


def test_another_judge_is_one_line(models, tmp_path):
    assert started(tmp_path / "own", models["base"], "--nocheck") == 0
    file = tmp_path / "own" / "config.py"
    text = file.read_text()
    assert text.count('JUDGE = ""') == 1
    file.write_text(text.replace('JUDGE = ""', 'JUDGE = "http://localhost:8000/v1"'))
    config = read_config(file.parent)
    assert (config.feedback.judge, config.endpoint.url, config.feedback.templates) == (
        "endpoint", ("http://localhost:8000/v1",), "")
    file.write_text(text.replace('JUDGE = ""', f'JUDGE = "{models["chatml"]}"'))
    config = read_config(file.parent)
    assert (config.feedback.judge, config.judge.path) == ("model", (str(models["chatml"]),))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "more"), [
    ("base", ()), ("thinking", ("--config.stages=revise,sft,compare,preference,report",)),
])
def test_two_commands_lead_to_a_report(few_sampling_programs, models, tmp_path, capsys, kind, more):
    """A random model judges by chance and gives the answer letters little probability, so its run is a rehearsal."""
    assert started(tmp_path / "own", models[kind]) == 0
    out = capsys.readouterr().out
    assert "PROBLEM judge: this model cannot judge: " in out and "most of its probability is for other text" in out
    assert "its results mean nothing" in out and all(f"\n  {part} " in out for part in ("prompt", "critique", "revision"))
    command = ["train", f"--config={tmp_path}/own/config.py", f"--workdir={tmp_path}/own/run", *SMALL, *more]
    assert train.main(command) == 0
    assert "of its probability to text other than the options" in (tmp_path / "own" / "run" / "report.html").read_text()


def without(folder: pathlib.Path, source: pathlib.Path, *names: str) -> pathlib.Path:
    shutil.copytree(source, folder)
    for name in names:
        (folder / name).unlink()
    return folder


def unknown_family(folder: pathlib.Path, source: pathlib.Path) -> pathlib.Path:
    shutil.copytree(source, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"model_type": "mamba"}))
    return folder


def with_template(folder: pathlib.Path, source: pathlib.Path, template: str) -> pathlib.Path:
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize(("make", "message"), [
    (lambda path, model: without(path, model, "tokenizer.json"), "has no tokenizer: neither tokenizer.json nor"),
    (lambda path, model: without(path, model, "config.json"), "config.json does not exist; a folder in Hugging Face format"),
    (unknown_family, "'mamba'"),
    (lambda path, model: path, "is not a folder; give the folder that has the model's config.json"),
    (lambda path, model: with_template(path, model, "{{ messages[0].content }"), "chat template"),
    (lambda path, model: with_template(path, model, "{% for m in messages %}{{ m.content }}{% endfor %}"), "chat template"),
], ids=["tokenizer", "config", "family", "folder", "syntax", "end"])
def test_a_model_that_cannot_be_used_is_one_sentence(models, tmp_path, capsys, make, message):
    model = make(tmp_path / "model", models["chatml"])
    assert started(tmp_path / "own", model) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "own").exists()


def test_a_folder_with_files_is_kept_and_a_bad_place_is_refused(models, tmp_path, capsys, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr("jaxalign.starter.files.os.access", lambda path, mode: path != tmp_path / "closed")
    for place, message in (("full", "already has files; give the name of a new folder"),
                           ("full/notes.txt", "is a file; give the name of a new folder"),
                           ("full/notes.txt/own", "notes.txt is not a folder; give another folder"),
                           ("closed/own", "closed cannot be written; give another folder")):
        assert started(tmp_path / place, models["chatml"]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--model=x"], "0 folders are given; one is expected"),
    (["a", "b", "--model=x"], "2 folders are given"),
    (["a"], "--model is missing; set it to the folder of your model"),
    (["a", "--modle=x"], "--help lists the flags"),
])
def test_mistakes_in_the_arguments_are_one_sentence(capsys, arguments, message):
    assert init.main(["init", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
