"""`python -m jaxalign.export`: sets of a run that jaxalign, `datasets` and TRL read, their card, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys

import numpy as np
import pytest

from jaxalign.data.sources.preferences import read_preferences
from jaxalign.data.tokenizers.load import load_run_tokenizer
from jaxalign.export import main
from jaxalign.registry.data_sources import data_source
from jaxalign.stages.shared import labelled, sources
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.fitting import token_counter
from jaxalign.stages.shared.manifest import read_manifest
from jaxalign.stages.shared.preference_pairs import preference_pairs
from jaxalign.stages.shared.shards import Shards
from jaxalign.trainers.scoring import pair_arrays
from jaxalign.trainers.sft import packed
from tests.finished_run import comparison, write_run

pytestmark = pytest.mark.medium

SETS = ("sft", "preference", "labels")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The work directory of a run, its config, and the folders with its export in both formats."""
    folder = tmp_path_factory.mktemp("exported")
    workdir, config = write_run(folder)
    for name in ("jsonl", "parquet"):
        assert main(["export", str(workdir), f"--out={folder / name}", f"--format={name}"]) == 0
    return workdir, config, folder / "jsonl", folder / "parquet"


def rows_of(folder, name, split):
    return [json.loads(line) for line in (folder / name / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def context(run, stage):
    workdir, config, *_ = run
    return StageContext(config, workdir, workdir / stage, False)


def test_datasets_loads_the_same_rows_and_features_from_both_formats(run, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    *_, lines, tables = run
    for name in SETS:
        first, second = (datasets.load_dataset(str(folder), name, cache_dir=str(tmp_path / folder.name))
                         for folder in (lines, tables))
        assert set(first) == set(second) == ({"train"} if name == "labels" else {"train", "test"})
        for split in first:
            assert first[split].features == second[split].features
            assert first[split].to_list() == second[split].to_list() == rows_of(lines, name, split)


def test_a_pair_has_the_answer_that_the_label_prefers_as_chosen(run):
    rows = {row["prompt_id"]: row for split in ("train", "test") for row in rows_of(run[2], "preference", split)}
    assert len(rows) == 36 and not any(int(name[1:]) % 10 == 4 for name in rows)  # 4 of 40 pairs are undecided.
    even, odd = rows["p2"], rows["p3"]
    assert even["chosen"] == [{"role": "assistant", "content": "It is 2."}]
    assert even["rejected"] == [{"role": "assistant", "content": "Go away! \u00fc"}]
    assert (even["score_chosen"], even["score_rejected"]) == (pytest.approx(0.88), pytest.approx(0.12))
    assert odd["chosen"] == [{"role": "assistant", "content": "Go away! \u00fc"}]
    assert odd["score_chosen"] == pytest.approx(1 - 0.23)
    assert [message["role"] for message in odd["prompt"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_pairs_read_back_give_the_training_batch_of_the_run(run, form):
    workdir, config, *folders = run
    tokenizer, section = load_run_tokenizer(config, workdir), config.preference
    theirs = preference_pairs(context(run, "preference"), tokenizer)
    for split, pairs in (("train", theirs.train), ("test", theirs.held_out)):
        ours, report = read_preferences(folders[form == "parquet"] / "preference" / f"{split}.{form}")
        assert report.pairs == report.rows == len(pairs)
        expected, actual = (pair_arrays(tokenizer, rows, config.data.style, section.max_length, 0.0) for rows in (pairs, ours))
        swapped = (expected.label < 0.5)[:, None]
        np.testing.assert_array_equal(actual.length, np.where(swapped, expected.length[:, ::-1], expected.length))
        width = min(actual.tokens.shape[2], expected.tokens.shape[2])
        flipped = np.where(swapped[..., None], expected.tokens[:, ::-1], expected.tokens)
        np.testing.assert_array_equal(actual.tokens[..., :width], flipped[..., :width])
        assert actual.length.max() <= width
        assert (actual.label == 1).all()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_answers_read_back_give_the_packed_rows_of_the_run(run, form):
    workdir, config, *folders = run
    tokenizer = load_run_tokenizer(config, workdir)
    train, held_out, _ = labelled.answered(context(run, "sft"), None)
    for split, answers in (("train", train), ("test", held_out)):
        path = folders[form == "parquet"] / "sft" / f"{split}.{form}"
        data = dataclasses.replace(config.data, source="messages_jsonl", train=str(path), red_team="", held_out_share=0.0)
        files = dataclasses.replace(config, data=data, stages=("sft",))
        inputs = sources.SourceInputs(files, token_counter(tokenizer, files), files.model.max_length, False)
        found = data_source(files).load("demonstrations")(inputs)
        again = [labelled.answer_of(row) for row in (*found.train, *found.held_out)]
        assert again == answers
        for ours, theirs in zip(*(packed(tokenizer, rows, "chat", 96)[:1] for rows in (again, answers)), strict=True):
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            np.testing.assert_array_equal(ours.loss_mask, theirs.loss_mask)


def test_a_set_without_rows_is_left_out(tmp_path, capsys, monkeypatch):
    """Like that of pairs if the judge decided none: `datasets` cannot load a set without a file."""
    undecided = {"label": 0.5, "decided": False, "outcome": "order", "principle": None}
    monkeypatch.setattr("tests.finished_run.comparison", lambda i: dataclasses.replace(comparison(i), **undecided))
    workdir, _ = write_run(tmp_path, stages=("revise", "sft", "compare"))
    assert main(["export", str(workdir), f"--out={tmp_path / 'all'}"]) == 0
    printed = capsys.readouterr().out
    assert "set preference has no rows and is left out" in printed and "with NAME sft or labels" in printed
    assert 'config_name: "preference"' not in (tmp_path / "all" / "README.md").read_text(encoding="utf-8")
    assert main(["export", str(workdir), f"--out={tmp_path / 'pairs'}", "--sets=preference"]) == 2
    assert "no rows to export in preference" in capsys.readouterr().err and not (tmp_path / "pairs").exists()


def test_labels_contain_everything_that_stage_compare_wrote(run):
    exported = rows_of(run[2], "labels", "train")
    pairs = [labelled.row_comparison(row) for row in Shards(run[0] / "compare").read()]
    assert len(exported) == 40
    absent = ("outcome", "principle", "problem", "outside", "disagreement", "weight")  # Fields without a value are not written.
    again = [labelled.row_comparison({name: value for name, value in row.items() if name not in absent or value is not None})
             for row in exported]
    assert again == pairs == [comparison(i) for i in range(40)]


def test_the_card_states_the_facts_of_the_run(run):
    workdir, _, folder, _ = run
    card = (folder / "README.md").read_text(encoding="utf-8")
    for stage in ("revise", "compare"):
        manifest = read_manifest(workdir / stage)
        assert f"| stage {stage} | output | {manifest.output_hash} |" in card
    for name, content in read_manifest(workdir / "compare").files.items():
        assert f"| {name.rpartition('/')[2]} | content | {content} |" in card
    for name in ("sft", "preference", "labels"):
        for file in (folder / name).iterdir():
            count = len(file.read_text(encoding="utf-8").splitlines())
            assert f"| {name} | {file.stem} | {count} | {name}/{file.name} |" in card
    assert "| Constitution of compare | default |" in card
    assert "| Judge of compare | local (the base model of the run) |" in card
    assert "| Base model | base |" in card and "| Seed | 7 |" in card
    refused = json.loads((workdir / "revise" / "summary.json").read_text())["usable"]["reasons"]["refused"]
    assert f"| sft | refused: the judge declined to answer | {refused} |" in card
    assert "| preference | order: the judge prefers the other answer when they are shown in the other order | 4 |" in card
    assert "The run has no audit of the judge" in card
    assert str(workdir.parent) not in card  # No path of the machine.


def test_the_card_accounts_for_every_pair(run):
    workdir, _, folder, _ = run
    lost = (folder / "README.md").read_text(encoding="utf-8").partition("## Rows left out")[2].partition("##")[0]
    left_out = sum(map(int, re.findall(r"^\| preference \| .* \| (\d+) \|$", lost, re.MULTILINE)))
    exported = sum(len(rows_of(folder, "preference", split)) for split in ("train", "test"))
    pairs = json.loads((workdir / "compare" / "summary.json").read_text())["pairs"]
    assert exported + left_out == pairs == 40 and left_out == 4


def test_sets_and_a_run_without_a_stage_are_selected(run, tmp_path, capsys):
    workdir = run[0]
    assert main(["export", str(workdir), f"--out={tmp_path / 'a'}", "--sets=labels"]) == 0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["README.md", "labels"]
    shutil.copytree(workdir, tmp_path / "run", ignore=shutil.ignore_patterns("compare", "preference"))
    assert main(["export", str(tmp_path / "run"), f"--out={tmp_path / 'b'}"]) == 0
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["README.md", "sft"]
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), f"--out={tmp_path / 'c'}", "--sets=preference"]) == 2
    assert capsys.readouterr().err == (f"{tmp_path / 'run'} has no stage compare, which makes the set preference; leave "
                                       "preference out of --sets\n")
    assert not (tmp_path / "c").exists()


def test_mistakes_are_refused_in_one_sentence_and_leave_nothing(run, tmp_path, capsys, monkeypatch):
    workdir = run[0]
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("text")
    for name in ("unfinished", "changed", "trained"):
        ignored = ("revise", "compare", "preference") if name == "trained" else ()
        shutil.copytree(workdir, tmp_path / name, ignore=shutil.ignore_patterns("params", *ignored))
    manifest = tmp_path / "unfinished" / "compare" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"status": "done"', '"status": "running"'))
    with open(tmp_path / "changed" / "compare" / "rows-00000.jsonl", "a") as file:
        file.write("{}\n")
    out = f"--out={tmp_path / 'out'}"
    before = sorted(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for arguments, message in [
        ([str(tmp_path / "none"), out], "none is not the work directory of a run: it has no config.json"),
        ([str(workdir / "sft"), out], "sft is not the work directory of a run"),
        ([str(tmp_path / "trained"), out], "has no rows to export: it has neither stage revise nor stage compare"),
        ([str(tmp_path / "unfinished"), out], "stage compare is unfinished in"),
        ([str(tmp_path / "changed"), out], "its output rows-00000.jsonl has changed since the stage ended"),
        ([str(workdir), f"--out={tmp_path / 'used'}"], "used already exists; give the name of a new folder"),
        ([str(workdir), f"--out={tmp_path / 'used' / 'mine' / 'x'}"], "which cannot be created (Not a directory)"),
        ([str(workdir), out, "--format=parquet"], "--format=parquet needs pyarrow, which is not installed; run pip install"),
        ([str(workdir), out, "--format=csv"], "value should be one of <jsonl|parquet>"),
        ([str(workdir), out, "--sets=dpo"], "--sets has 'dpo'; the sets are sft, preference, labels"),
        ([str(workdir)], "--out is not given; it must be a new folder"),
        ([out], "no work directory is given"),
        ([str(workdir), "x", out], "'x' is not expected on the command line"),
    ]:
        assert main(["export", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert sorted(tmp_path.iterdir()) == before
