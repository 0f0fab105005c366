"""The pipeline with small fake stages: skipping, resuming, refusing, moving folders aside, locking."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict, to_dict
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.errors import UserError
from jaxalign.pipeline import running
from jaxalign.pipeline.changes import MovedFiles
from jaxalign.rollout import forecast
from jaxalign.stages.shared.base import Stage, StageContext
from jaxalign.stages.shared.manifest import read_manifest

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Counting(Stage):
    """Counts to three in its folder, with one append per step; `stop_at` interrupts it before that step."""

    def __init__(self, name, config_fields, inputs=(), files=None):
        self.name, self.config_fields = name, config_fields
        self.read, self.outside, self.stop_at, self.starts = inputs, files or {}, None, 0

    def inputs(self, config):
        return self.read

    def files(self, config):
        return self.outside

    def run(self, context: StageContext):
        self.starts += 1
        path = context.directory / "steps"
        done = path.read_text().split() if path.exists() else []
        assert context.resumed == (self.starts > 1)
        for source in self.inputs(context.config):
            assert (context.input_directory(source) / "steps").read_text().split() == ["0", "1", "2"]
        for step in range(len(done), 3):
            if step == self.stop_at:
                self.stop_at = None
                raise KeyboardInterrupt
            with open(path, "a") as file:
                file.write(f"{step} ")


@pytest.fixture
def stages():
    made = [Counting("pretrain", ("seed", "pretrain")), Counting("sft", ("sft",), ("pretrain",)),
            Counting("ppo", ("ppo.kl_coef", "ppo.clip"), ("sft",))]
    return {stage.name: stage for stage in made}


def config(**values):
    start = {"stages": ("pretrain", "sft", "ppo"), "compile_cache": None}
    start["sft"] = {"epochs": 1, "optimizer": {"b1": 0.9}}
    return from_config_dict(start | values)


def tree(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def unloadable(name):
    raise AssertionError(f"stage {name} was loaded although nothing is to be computed")


def starts(stages) -> list[int]:
    return [stage.starts for stage in stages.values()]


def test_a_second_run_computes_nothing_loads_no_stage_and_changes_no_file(stages, tmp_path, capsys):
    pipeline.run(config(), tmp_path, load=stages.__getitem__)
    before = tree(tmp_path)
    capsys.readouterr()
    pipeline.run(config(), tmp_path, load=unloadable)
    assert capsys.readouterr().out.splitlines() == [
        "[pretrain] done, nothing to compute", "[sft] done, nothing to compute", "[ppo] done, nothing to compute"]
    assert tree(tmp_path) == before


def test_the_manifest_records_the_config_inputs_and_mesh_of_a_stage(stages, tmp_path):
    pipeline.run(config(mesh={"data": 2}), tmp_path, load=stages.__getitem__)
    upstream = json.loads((tmp_path / "sft/manifest.json").read_text())
    manifest = json.loads((tmp_path / "ppo/manifest.json").read_text())
    assert manifest["stage"] == "ppo" and manifest["status"] == "done"
    assert manifest["config"] == {"ppo.kl_coef": config().ppo.kl_coef, "ppo.clip": config().ppo.clip}
    assert manifest["inputs"] == {"sft": upstream["output_hash"]}
    assert manifest["mesh"] == to_dict(config())["mesh"] | {"data": 2}
    assert json.loads((tmp_path / "config.json").read_text()) == to_dict(resolve_auto(config(mesh={"data": 2})))


def test_an_unwritable_compile_cache_is_reported_once(stages, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # Keep the compile cache of the tests.
    (tmp_path / "file").write_text("")
    pipeline.run(config(compile_cache=str(tmp_path / "file")), tmp_path / "run", load=stages.__getitem__)
    why = "cannot be written (File exists); programs of this run are not cached"
    lines = [line for line in capsys.readouterr().out.splitlines() if "compile_cache" in line]
    assert lines == [f"config.compile_cache: {tmp_path}/file {why}"]


def test_the_compile_cache_can_be_in_a_bucket(stages, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    given = {}
    monkeypatch.setattr(jax.config, "update", given.__setitem__)
    pipeline.run(config(compile_cache="gs://bucket/programs"), tmp_path, load=stages.__getitem__)
    assert given["jax_compilation_cache_dir"] == "gs://bucket/programs"


def test_an_interrupted_stage_resumes_and_ends_like_an_uninterrupted_one(stages, tmp_path, capsys):
    stages["sft"].stop_at = 1
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(config(), tmp_path / "a", load=stages.__getitem__)
    assert read_manifest(tmp_path / "a/sft").status == "running"
    pipeline.run(config(), tmp_path / "a", load=stages.__getitem__)
    assert starts(stages) == [1, 2, 1]
    assert "[pretrain] done, nothing to compute\n[sft] continuing" in capsys.readouterr().out
    for stage in stages.values():
        stage.starts = 0
    pipeline.run(config(), tmp_path / "b", load=stages.__getitem__)
    contents = [{name: text for name, text in tree(tmp_path / run).items() if name not in (".lock", "system.jsonl")}
                for run in "ab"]
    assert contents[0] == contents[1]


def test_a_run_resumes_on_another_mesh(stages, tmp_path):
    stages["pretrain"].stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(config(), tmp_path, load=stages.__getitem__)
    pipeline.run(config(mesh={"data": 2}), tmp_path, load=stages.__getitem__)
    assert read_manifest(tmp_path / "pretrain").mesh["data"] == 2
    assert starts(stages) == [2, 1, 1]


def test_another_config_is_refused_with_the_difference_and_nothing_is_changed(stages, tmp_path):
    pipeline.run(config(), tmp_path, load=stages.__getitem__)
    before = tree(tmp_path)
    with pytest.raises(UserError) as caught:
        pipeline.run(config(sft={"epochs": 3, "optimizer": {"b1": 0.5}}), tmp_path, load=stages.__getitem__)
    message = str(caught.value)
    assert "[sft] config.sft.epochs was 1 and is 3" in message
    assert "[sft] config.sft.optimizer.b1 was 0.9 and is 0.5" in message
    assert "[ppo] its input sft changes" in message
    assert "[pretrain]" not in message and "--overwrite" in message and "--workdir" in message
    assert tree(tmp_path) == before


def test_a_field_that_no_stage_reads_changes_nothing(stages, tmp_path):
    pipeline.run(config(), tmp_path, load=stages.__getitem__)
    pipeline.run(config(evaluate={"examples": 3}, ppo={"gamma": 0.5}), tmp_path, load=stages.__getitem__)
    assert starts(stages) == [1, 1, 1]


def test_limits_and_the_interval_of_checkpoints_can_be_changed_in_and_after_a_stage(stages, tmp_path):
    def with_sft(**fields):
        return config(sft={"epochs": 1, "optimizer": {"b1": 0.9}} | fields)

    stages["sft"].stop_at = 1
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(config(), tmp_path, load=stages.__getitem__)
    pipeline.run(with_sft(checkpoint_every=7, required_share=0.0), tmp_path, load=stages.__getitem__)
    pipeline.run(with_sft(checkpoint_every=8, required_rows=3), tmp_path, load=stages.__getitem__)
    assert starts(stages) == [1, 2, 1]


def test_calls_of_a_reward_can_be_changed_only_while_its_stage_is_unfinished(stages, tmp_path):
    def with_reward(**fields):
        return config(reward={"source": "callable", "callable": "mine.py:score"} | fields)

    stages["ppo"] = ppo = Counting("ppo", ("reward",), ("sft",))
    ppo.stop_at = 1
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(with_reward(), tmp_path, load=stages.__getitem__)
    pipeline.run(with_reward(timeout_s=9.0, retries=0), tmp_path, load=stages.__getitem__)
    pipeline.run(with_reward(timeout_s=9.0, retries=0, backoff_s=2.0), tmp_path, load=stages.__getitem__)
    assert starts(stages) == [1, 1, 2]
    with pytest.raises(UserError, match="config.reward.timeout_s was 9.0 and is 60.0"):
        pipeline.run(with_reward(), tmp_path, load=stages.__getitem__)


def test_a_stage_that_now_has_another_input_is_out_of_date(stages, tmp_path):
    """The inputs of a stage can depend on a field outside its config fields, such as the stages of the run."""
    ppo = stages["ppo"]
    ppo.inputs = lambda config: ("sft",) if "sft" in config.stages else ("pretrain",)
    pipeline.run(config(stages=("pretrain", "ppo")), tmp_path, load=stages.__getitem__)
    with pytest.raises(UserError, match=r"\[ppo\] it read pretrain and would now read sft"):
        pipeline.run(config(), tmp_path, load=stages.__getitem__)
    assert starts(stages) == [1, 0, 1]
    ppo.starts = 0
    pipeline.run(config(), tmp_path, overwrite=True, load=stages.__getitem__)
    assert list(read_manifest(tmp_path / "ppo").inputs) == ["sft"]


def test_pitfall_13_overwriting_moves_the_old_folders_aside(stages, tmp_path):
    pipeline.run(config(), tmp_path, load=stages.__getitem__)
    old = tree(tmp_path / "ppo")
    for kl_coef in (0.5, 0.7):
        stages["ppo"].starts = 0
        pipeline.run(config(ppo={"kl_coef": kl_coef}), tmp_path, overwrite=True, load=stages.__getitem__)
    assert tree(tmp_path / "ppo.old-1") == old
    assert read_manifest(tmp_path / "ppo.old-2").config["ppo.kl_coef"] == 0.5
    assert read_manifest(tmp_path / "ppo").config["ppo.kl_coef"] == 0.7
    assert starts(stages) == [1, 1, 1]


def test_overwriting_repeats_the_stages_that_read_a_changed_stage(stages, tmp_path):
    pipeline.run(config(), tmp_path, load=stages.__getitem__)
    for stage in stages.values():
        stage.starts = 0
    pipeline.run(config(sft={"epochs": 3}), tmp_path, overwrite=True, load=stages.__getitem__)
    assert starts(stages) == [0, 1, 1]
    assert (tmp_path / "ppo.old-1").is_dir() and not (tmp_path / "pretrain.old-1").exists()


def test_overwriting_unchanged_stages_keeps_them(stages, tmp_path):
    pipeline.run(config(), tmp_path, load=stages.__getitem__)
    pipeline.run(config(), tmp_path, overwrite=True, load=unloadable)
    assert not list(tmp_path.glob("*.old-*"))


def test_only_the_stage_of_a_missing_folder_is_repeated(stages, tmp_path):
    pipeline.run(config(), tmp_path, load=stages.__getitem__)
    (tmp_path / "sft").rename(tmp_path / "elsewhere")
    for stage in stages.values():
        stage.starts = 0
    pipeline.run(config(), tmp_path, load=stages.__getitem__)
    # The same config gives the same output, so ppo, which read the old folder, remains valid.
    assert starts(stages) == [0, 1, 0]


def test_a_missing_folder_with_a_changed_config_makes_its_readers_out_of_date(stages, tmp_path):
    pipeline.run(config(), tmp_path, load=stages.__getitem__)
    (tmp_path / "sft").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="its input sft changes"):
        pipeline.run(config(sft={"epochs": 3}), tmp_path, load=stages.__getitem__)


def test_changed_file_content_is_detected_and_a_deleted_file_is_accepted(stages, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("one")
    stages["sft"].outside = {data: "data.train"}
    run = tmp_path / "run"
    pipeline.run(config(), run, load=stages.__getitem__)
    data.write_text("two")
    with pytest.raises(UserError, match="the content of .*data.jsonl has changed"):
        pipeline.run(config(), run, load=stages.__getitem__)
    data.unlink()
    pipeline.run(config(), run, load=unloadable)


def moved_run(stages, folder: pathlib.Path, stop_at=None, data="data.jsonl"):
    """Runs the stages with a data file and a model folder in `folder`."""
    stages["sft"].config_fields, stages["sft"].read = ("data", "model.path"), ()
    stages["ppo"].config_fields, stages["ppo"].stop_at = ("data",), stop_at
    stages["sft"].outside = {folder / "data.jsonl": "data.train", folder / "model/config.json": "model.path"}
    data = {"source": "preferences_jsonl", "style": "hh", "train": str(folder / data)}
    model = {"source": "huggingface", "path": str(folder / "model")}
    pipeline.run(config(stages=("sft", "ppo"), data=data, model=model), folder / "run", load=stages.__getitem__)


@pytest.fixture
def own(tmp_path):
    """The folder of a user, with data and a model."""
    (tmp_path / "own/model").mkdir(parents=True)
    (tmp_path / "own/data.jsonl").write_text("one")
    (tmp_path / "own/model/config.json").write_text("{}")
    return tmp_path / "own"


def test_a_run_continues_after_its_folder_was_moved_with_the_data_and_the_model(stages, own):
    with pytest.raises(KeyboardInterrupt):
        moved_run(stages, own, stop_at=1)
    for name in ("moved", "again"):
        own = own.rename(own.parent / name)
        moved_run(stages, own)
    assert starts(stages)[1:] == [1, 2]


@pytest.mark.parametrize("change", ["data.jsonl", "model/config.json"])
def test_a_moved_file_with_other_content_is_out_of_date(stages, own, change):
    moved_run(stages, own)
    own = own.rename(own.parent / "moved")
    (own / change).write_text("two")
    field = "data.train" if change == "data.jsonl" else "model.path"
    with pytest.raises(UserError, match=rf"\[sft\] config.{field} was "):
        moved_run(stages, own)


def test_a_copy_of_a_run_does_not_depend_on_the_files_of_the_original(stages, own):
    moved_run(stages, own)
    copy = own.parent / "copy"
    shutil.copytree(own, copy)
    (own / "data.jsonl").write_text("two")
    moved_run(stages, copy)
    assert starts(stages)[1:] == [1, 1]


def test_a_moved_file_with_another_name_or_a_further_file_is_out_of_date(stages, own):
    moved_run(stages, own)
    (own / "data.jsonl").rename(own / "other.jsonl")
    stages["sft"].outside = {}
    with pytest.raises(UserError, match="config.data.train was .*data.jsonl' and is .*other.jsonl'"):
        moved_run(stages, own, data="other.jsonl")
    (own / "other.jsonl").rename(own / "data.jsonl")
    moved = own.rename(own.parent / "moved")
    (moved / "model/adapter.json").write_text("{}")
    reads, stages["sft"].files = stages["sft"].files, lambda config: {
        **reads(config), moved / "model/adapter.json": "model.path"}
    with pytest.raises(UserError, match="config.model.path was "):
        moved_run(stages, moved)


@pytest.fixture
def judged(stages, tmp_path):
    """(judge file, config, function that runs): the stage compare of the run reads a judge and a data file."""
    files = {tmp_path / "judge.py": "feedback.judge", tmp_path / "data.jsonl": "data.train"}
    for path in files:
        path.write_text("class Judge:\n    def compare(self, requests, draw):\n        return [0.5] * len(requests)\n")
    stages["compare"] = Counting("compare", ("feedback.judge", "reward.callable"), ("sft",), files)
    stages["ppo"] = Counting("ppo", ("ppo.kl_coef",), ("compare",))

    def run(**values):
        values = {"stages": ("sft", "compare", "ppo"), "feedback": {"judge": f"{tmp_path / 'judge.py'}:Judge"}} | values
        pipeline.run(config(**{"model": {"source": "huggingface", "path": "x"}} | values), tmp_path / "run",
                     load=stages.__getitem__)

    stages["sft"].read = ()
    return tmp_path / "judge.py", run


def test_the_file_of_a_judge_may_change_while_its_stage_is_unfinished(judged, stages, tmp_path, capsys):
    path, run = judged
    stages["compare"].stop_at = 1
    with pytest.raises(KeyboardInterrupt):
        run()
    old = read_manifest(tmp_path / "run" / "compare").files[str(path)]
    path.write_text(path.read_text() + "# corrected")
    run()
    line = "[compare] judge.py has changed since this stage began; its finished rows are kept"
    assert capsys.readouterr().out.count(line) == 1 and starts(stages)[1:] == [1, 1, 2]
    assert (tmp_path / "run" / "compare" / "steps").read_text() == "0 1 2 "
    assert read_manifest(tmp_path / "run" / "compare").files[str(path)] != old
    run()
    path.write_text(path.read_text() + ", again")
    with pytest.raises(UserError, match="the content of .*judge.py has changed"):
        run()


def test_a_data_file_of_an_unfinished_stage_may_not_change(judged, stages, tmp_path):
    path, run = judged
    stages["compare"].stop_at = 1
    with pytest.raises(KeyboardInterrupt):
        run()
    (tmp_path / "data.jsonl").write_text("other")
    with pytest.raises(UserError, match="the content of .*data.jsonl has changed"):
        run()


def test_the_file_of_a_judge_that_is_also_a_reward_may_not_change(judged, stages):
    path, run = judged
    reward = {"reward": {"source": "callable", "callable": f"{path}:reward"}}
    stages["compare"].stop_at = 1
    with pytest.raises(KeyboardInterrupt):
        run(**reward)
    path.write_text(path.read_text() + "# corrected")
    with pytest.raises(UserError, match="the content of .*judge.py has changed"):
        run(**reward)


def test_the_file_of_a_reward_may_change_while_its_stage_is_unfinished(stages, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("def score(prompts, responses): raise ValueError")
    stages["ppo"] = ppo = Counting("ppo", ("reward",), ("sft",), {path: "reward.callable"})
    values = config(reward={"source": "callable", "callable": f"{path}:score"})
    ppo.stop_at = 1
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(values, tmp_path / "run", load=stages.__getitem__)
    path.write_text("def score(prompts, responses): return [0.0] * len(responses)")
    pipeline.run(values, tmp_path / "run", load=stages.__getitem__)
    assert "[ppo] mine.py has changed since this stage began; its finished iterations are kept" in capsys.readouterr().out
    pipeline.run(values, tmp_path / "run", load=stages.__getitem__)
    assert starts(stages) == [1, 1, 2]
    path.write_text("def score(prompts, responses): return [1.0] * len(responses)")
    with pytest.raises(UserError, match=r"the content of .*mine\.py has changed"):
        pipeline.run(values, tmp_path / "run", load=stages.__getitem__)


def test_a_missing_file_is_reported_before_anything_is_computed(stages, tmp_path):
    stages["ppo"].outside = {tmp_path / "absent.jsonl": "data.train"}
    with pytest.raises(UserError, match="config.data.train: .*absent.jsonl cannot be read"):
        pipeline.run(config(), tmp_path, load=stages.__getitem__)
    assert starts(stages) == [0, 0, 0]


def test_stages_can_be_run_one_at_a_time(stages, tmp_path):
    with pytest.raises(UserError, match="sft reads stage pretrain, which has not been run in this work directory; add"):
        pipeline.run(config(stages=("sft",)), tmp_path, load=stages.__getitem__)
    pipeline.run(config(stages=("pretrain",)), tmp_path, load=stages.__getitem__)
    pipeline.run(config(stages=("sft",)), tmp_path, load=stages.__getitem__)
    assert starts(stages) == [1, 1, 0]


def test_an_unfinished_or_outdated_input_is_not_read(stages, tmp_path):
    stages["pretrain"].stop_at = 1
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(config(), tmp_path, load=stages.__getitem__)
    with pytest.raises(UserError, match="pretrain is unfinished .*add pretrain to config.stages"):
        pipeline.run(config(stages=("sft",)), tmp_path, load=stages.__getitem__)
    pipeline.run(config(), tmp_path, load=stages.__getitem__)
    with pytest.raises(UserError, match="pretrain .* must be redone; add pretrain to config.stages"):
        pipeline.run(config(stages=("sft",), seed=5), tmp_path, overwrite=True, load=stages.__getitem__)
    assert not list(tmp_path.glob("*.old-*"))


def test_a_folder_that_no_run_made_is_not_changed(stages, tmp_path):
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="sft exists but was not written by a run"):
        pipeline.run(config(), tmp_path, load=stages.__getitem__)
    assert (tmp_path / "sft/notes.txt").read_text() == "mine"


WHOLE = {"stage": "sft", "status": "done", "config": {}, "inputs": {}, "files": {}, "mesh": {}, "outputs": {}}


@pytest.mark.parametrize("content", [
    "", "{", "[]", "{}", "[" * 100_000, json.dumps(WHOLE | {"status": "x"}),
    *(json.dumps(WHOLE | {name: value}) for name in WHOLE for value in (7, None, [1])),
])
def test_a_damaged_manifest_is_named(stages, tmp_path, content):
    pipeline.run(config(), tmp_path, load=stages.__getitem__)
    (tmp_path / "sft/manifest.json").write_text(content)
    with pytest.raises(UserError, match="sft/manifest.json is damaged"):
        pipeline.run(config(), tmp_path, load=stages.__getitem__)


@pytest.mark.process
def test_two_processes_do_not_share_a_work_directory(stages, tmp_path):
    code = f"""
import sys
from jaxalign.storage import LocalStorage
with LocalStorage({str(tmp_path)!r}).lock():
    print("locked", flush=True)
    sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid}; wait"):
            pipeline.run(config(), tmp_path, load=stages.__getitem__)
    finally:
        holder.kill()
        holder.communicate()
    pipeline.run(config(), tmp_path, load=stages.__getitem__)  # A killed process holds no lock.
    assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_a_work_directory_that_is_a_file_is_refused(stages, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="cannot be used .*choose another --workdir"):
        pipeline.run(config(), tmp_path / "run", load=stages.__getitem__)


def test_the_end_of_a_run_prints_the_table_and_the_report(tmp_path, capsys):
    class Evaluate(Counting):
        def run(self, context):
            rate = {"count": 3, "total": 12, "rate": 0.25, "low": 0.09, "high": 0.53}
            summary = {"models": ["base"], "rates": {"base": {"harmful": rate}}}
            (context.workdir / "summary.json").write_text(json.dumps(summary))

    class Report(Counting):
        def run(self, context):
            (context.workdir / "report.html").write_text("<html>")

    stages = {"evaluate": Evaluate("evaluate", ("evaluate",)), "report": Report("report", (), ("evaluate",))}
    for load in (stages.__getitem__, unloadable):  # The second run has nothing left to compute.
        found = pipeline.run(config(stages=("evaluate", "report")), tmp_path, load=load)
        out = capsys.readouterr().out
        assert "(3/12)" in out and "(3/12)" in found.table() and found.report == tmp_path / "report.html"
        assert out.endswith(f"Report: {tmp_path / 'report.html'}\n")


def test_a_new_field_at_its_default_changes_nothing(tmp_path, stages):
    """An upgrade adds fields to a section; earlier results count as made with the default values."""
    two = ("pretrain", "sft")
    pipeline.run(config(stages=two), tmp_path, load=stages.get)
    path = tmp_path / "sft" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["config"]["sft"]["rounds_used"], manifest["config"]["sft"]["optimizer"]["b2"]
    path.write_text(json.dumps(manifest))
    pipeline.run(config(stages=two), tmp_path, load=stages.get)
    assert starts(stages) == [1, 1, 0]
    other = config(stages=two, sft={"epochs": 1, "optimizer": {"b1": 0.9}, "rounds_used": "last"})
    with pytest.raises(UserError, match="config.sft.rounds_used was absent and is 'last'"):
        pipeline.run(other, tmp_path, load=stages.get)


class Failing(Counting):
    """Fails at its first start, after writing `leaves` to its folder, and a step if `after_a_step`."""

    def __init__(self, leaves=(), after_a_step=False, error=UserError):
        super().__init__("sft", ("sft",), ("pretrain",))
        self.leaves, self.after_a_step, self.error, self.setup_files = leaves, after_a_step, error, ("tokenizer.model",)

    def run(self, context):
        if self.starts:
            return super().run(context)
        for name in self.leaves:
            (context.directory / name).write_text("")
        if self.after_a_step:
            self.stop_at = 1
            with pytest.raises(KeyboardInterrupt):
                super().run(context)
        self.starts += 1
        raise self.error("sft.epochs cannot be used here")


@pytest.mark.parametrize("error", (UserError, ValueError))
@pytest.mark.parametrize("leaves", ((), ("tokenizer.model", "timing.jsonl")))
def test_a_failed_first_start_leaves_no_folder_so_that_the_option_can_be_corrected(stages, tmp_path, leaves, error):
    stages["sft"] = Failing(leaves, error=error)
    with pytest.raises(error, match="cannot be used here"):
        pipeline.run(config(), tmp_path, load=stages.__getitem__)
    assert not (tmp_path / "sft").exists()
    stages["sft"] = Counting("sft", ("sft",), ("pretrain",))
    pipeline.run(config(sft={"epochs": 3}), tmp_path, load=stages.__getitem__)  # Without overwrite.
    assert read_manifest(tmp_path / "sft").status == "done" and starts(stages) == [1, 1, 1]


def test_a_start_that_fails_after_some_work_can_be_resumed(stages, tmp_path):
    stages["sft"] = Failing(after_a_step=True)
    with pytest.raises(UserError, match="cannot be used here"):
        pipeline.run(config(), tmp_path, load=stages.__getitem__)
    assert read_manifest(tmp_path / "sft").status == "running"
    pipeline.run(config(), tmp_path, load=stages.__getitem__)
    assert (tmp_path / "sft/steps").read_text().split() == ["0", "1", "2"]


def test_a_resumed_stage_that_fails_keeps_its_manifest(stages, tmp_path):
    stages["sft"].stop_at = 0
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(config(), tmp_path, load=stages.__getitem__)
    stages["sft"] = Failing()
    with pytest.raises(UserError, match="cannot be used here"):
        pipeline.run(config(), tmp_path, load=stages.__getitem__)
    assert read_manifest(tmp_path / "sft").status == "running"


def test_a_run_returns_summaries_evaluation_and_report(stages, tmp_path):
    (tmp_path / "report.html").write_text("<html>")  # It belongs to no stage of this config.
    found = pipeline.run(config(), tmp_path, load=stages.__getitem__)
    assert found.workdir == tmp_path and list(found.stages) == ["pretrain", "sft", "ppo"]
    assert found.stages["sft"].directory == tmp_path / "sft" and found.stages["sft"].summary == {}
    assert found.evaluation is None and found.report is None and found.table() == ""
    (tmp_path / "sft/summary.json").write_text('{"loss": 1.5}')
    assert pipeline.run(config(), tmp_path, load=unloadable).stages["sft"].summary == {"loss": 1.5}


def test_a_path_with_an_unknown_user_was_not_moved():
    """A path may be recorded on another machine, whose users this one does not have."""
    assert MovedFiles([], None, None).find("~no-such-user/model", "/elsewhere/model") == set()


@pytest.mark.parametrize(("ended", "later", "released"), [
    ("revise", ["sft"], True), ("revise", ["sft", "evaluate", "report"], False), ("evaluate", ["report"], False),
    ("pretrain", ["sft"], False), ("ppo", [], False),
])
def test_programs_of_sampling_are_released_if_later_stages_only_train(ended, later, released, monkeypatch):
    calls = []
    monkeypatch.setattr(forecast, "release_programs", lambda: calls.append(1))
    running._release_programs(from_config_dict({"stages": [ended, *later]}), ended, later)
    assert len(calls) == released
