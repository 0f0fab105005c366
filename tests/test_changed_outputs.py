"""Outputs of finished stages that were changed, cut, exchanged or deleted are found before anything reads them."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.pipeline import find_changes, run
from tests.small_run import CONFIG


@pytest.fixture
def copy(done, tmp_path):
    folder = tmp_path / done.name  # The report has the name.
    shutil.copytree(done, folder)
    return folder


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def exchange(folder):
    shutil.rmtree(folder / "sft" / "params")
    shutil.copytree(folder / "pretrain" / "params", folder / "sft" / "params")


ACTS = {
    "row file deleted": ("revise", "rows-00000.jsonl is missing", lambda f: (f / "revise/rows-00000.jsonl").unlink()),
    "row file cut": ("compare", "rows-00000.jsonl has changed", lambda f: cut(f / "compare/rows-00000.jsonl")),
    "label edited": ("compare", "rows-00000.jsonl has changed", lambda f: replace(f / "compare/rows-00000.jsonl", '"label": ')),
    "metrics doubled": ("sft", "metrics.jsonl has changed", lambda f: double(f / "sft/metrics.jsonl")),
    "summary edited": ("preference", "summary.json has changed",
                       lambda f: edit_json(f / "preference/summary.json", lambda content: content.update(scale=9.0))),
    "checks cut": ("ppo", "checks.json has changed", lambda f: cut(f / "ppo/checks.json")),
    "parameters exchanged": ("sft", "params has changed", exchange),
    "metadata of parameters deleted": ("ppo", "params is missing",
                                       lambda f: (f / "ppo/params/_CHECKPOINT_METADATA").unlink()),
}


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def replace(path, text):
    path.write_text(path.read_text().replace(text, text + "0", 1))


def double(path):
    path.write_text(path.read_text() * 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTS)
def test_a_changed_output_is_reported_with_its_stage_and_file(copy, name):
    stage, text, act = ACTS[name]
    config = from_config_dict(CONFIG)
    assert find_changes(config, copy) == {}
    act(copy)
    changed = find_changes(config, copy)
    assert [line for line in changed[stage] if text in line] == changed[stage][:1]
    assert {other for other, lines in changed.items() if any("its output" in line for line in lines)} == {stage}
    with pytest.raises(UserError, match=rf"\[{stage}\] its output .*{text}"):
        run(config, copy)


@pytest.mark.slow
def test_a_changed_byte_in_any_output_is_found(copy):
    rng, config = random.Random(0), from_config_dict(CONFIG)
    files = [path for stage in ("revise", "compare", "sft", "ppo", "preference") for path in sorted((copy / stage).iterdir())
             if path.is_file() and path.name not in ("manifest.json", "timing.jsonl")]
    for _ in range(20):
        path = rng.choice(files)
        before = path.read_bytes()
        content = bytearray(before)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        assert any(f"its output {path.name} has changed" in line for line in find_changes(config, copy)[path.parent.name])
        path.write_bytes(before)
    assert find_changes(config, copy) == {}


@pytest.mark.slow
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("null"), cut, double])
@pytest.mark.parametrize("name", ["summary.json", "report.html"])
def test_a_file_of_the_work_directory_itself_is_written_again(copy, name, damage, capsys):
    config, before = from_config_dict(CONFIG), (copy / name).read_bytes()
    for expected in (1, 0):
        damage(copy / name) if expected else None
        result = run(config, copy)
        assert (copy / name).read_bytes() == before
        assert capsys.readouterr().out.count(f"{name} was missing or had changed, and is written again") == expected
        assert result.report == copy / "report.html" and result.evaluation == json.loads((copy / "summary.json").read_text())


@pytest.mark.slow
def test_times_and_checkpoints_of_a_finished_stage_may_change(copy):
    (copy / "sft" / "timing.jsonl").write_text("")
    shutil.rmtree(copy / "ppo" / "checkpoints")
    (copy / "ppo" / "notes.txt").write_text("mine")
    assert find_changes(from_config_dict(CONFIG), copy) == {}
