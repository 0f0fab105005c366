"""A user's stage in `config.stages`: its folder, config section, manifest, resume, and section of the report."""

from __future__ import annotations

import pathlib

import pytest

import jaxalign as ja
from jaxalign import pipeline, train
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.registry.stages import STAGES, StageRecord
from jaxalign.stages.shared.manifest import read_manifest
from jaxalign.tracking.metrics import read_metrics

pytestmark = pytest.mark.medium

PLUGIN = f"{pathlib.Path(__file__).parent / 'plugins' / 'stage.py'}:RECORD"
BASE = {
    "compile_cache": None,
    "data": {"source": "arithmetic"},
    "arithmetic": {"examples": 200},
    "model": {"layers": 1, "embed": 16, "mlp": 24, "heads": 2, "kv_heads": 1, "head_dim": 8, "max_length": 32},
    "pretrain": {"steps": 12, "batch_rows": 2, "row_length": 32},
}
CONFIG = BASE | {"stages": ("pretrain", PLUGIN, "report")}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return a finished run with the stage, and the pipeline's return value."""
    workdir = tmp_path_factory.mktemp("stage") / "run"
    return workdir, pipeline.run(from_config_dict(CONFIG | {"plateau": {"tolerance": 0.5}}), workdir)


def test_it_runs_in_the_pipeline_and_its_summary_is_returned(done):
    workdir, result = done
    losses = [row["loss"] for row in read_metrics(workdir / "pretrain/metrics.jsonl")]
    expected = next(step for step, loss in enumerate(losses) if loss - min(losses) <= 0.5)
    assert list(result.stages) == ["pretrain", "plateau", "report"]
    assert result.stages["plateau"].summary == {"step": expected}
    manifest = read_manifest(workdir / "plateau")
    assert manifest.config == {"plateau": {"tolerance": 0.5}} and list(manifest.inputs) == ["pretrain"]


def test_its_section_is_in_the_report(done):
    workdir, result = done
    page = result.report.read_text()
    assert ">Plateau<" in page and f"At step {result.stages['plateau'].summary['step']}." in page
    assert "plateau ✓" in page


def test_a_stage_of_the_run_can_be_loaded(done):
    """The run's config has the section of the user's stage."""
    assert ja.load_model(done[0] / "pretrain").model.config.embed == 16
    with pytest.raises(UserError, match="belongs to the stage plateau, which does not train a language model; give one of pre"):
        ja.load_model(done[0] / "plateau")


def test_a_second_run_computes_nothing(done, capsys):
    workdir, _ = done
    pipeline.run(from_config_dict(CONFIG | {"plateau": {"tolerance": 0.5}}), workdir)
    assert capsys.readouterr().out.splitlines()[:3] == [
        f"[{stage}] done, nothing to compute" for stage in ("pretrain", "plateau", "report")]


def test_a_changed_value_in_its_section_is_detected(done):
    workdir, _ = done
    with pytest.raises(UserError, match=r"\[plateau\] config.plateau.tolerance was 0.5 and is 0.1"):
        pipeline.run(from_config_dict(CONFIG | {"plateau": {"tolerance": 0.1}}), workdir)


def test_its_section_can_be_set_by_a_flag_and_is_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = [f"    config.{name} = {value!r}" for name, value in {"stages": CONFIG["stages"], "compile_cache": None}.items()]
    lines = ["from jaxalign.config import default_config", "def get_config():", "    config = default_config()", *values]
    (tmp_path / "small.py").write_text("\n".join([*lines, "    return config"]))
    config, _, _ = train.read_arguments(["train", "--config=small.py", "--config.plateau.tolerance=0.25"])
    assert config.plateau.tolerance == 0.25
    assert train.main(["train", "--config=small.py", "--config.plateau.tolerance=-1"]) == 2
    assert "config.plateau.tolerance is -1" in capsys.readouterr().err
    assert train.main(["train", "--config=small.py", "--config.plateau.tolerence=1"]) == 2
    assert "config.plateau.tolerence is not a field of plateau; did you mean tolerance?" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "sentence"), [
    ("raise OSError('no disk')", "cannot be imported (OSError: no disk)"),
    ("OTHER = 1", "has no RECORD"),
    ("RECORD = 3", "is of type int; a jaxalign StageRecord is expected"),
    ("from jaxalign.registry.stages import StageRecord\nRECORD = StageRecord('sft', None)", "another stage with that name"),
])
def test_an_unusable_record_is_reported_in_one_sentence(tmp_path, content, sentence):
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(UserError, match="config.stages") as caught:
        from_config_dict(BASE | {"stages": ("pretrain", f"{tmp_path / 'mine.py'}:RECORD")})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("stage", "sentence"), [
    ("object()", "is of type object; an instance of a subclass of jaxalign.stages.shared.base.Stage is expected"),
    ("'nowhere.at_all:STAGE'", "nowhere.at_all cannot be imported"),
    ("type('S', (Stage,), {'name': 'other', 'run': print})()", "has the name 'other'; give both the same name"),
])
def test_an_invalid_stage_is_reported_in_one_sentence_before_anything_is_computed(tmp_path, stage, sentence):
    lines = ["from jaxalign.registry.stages import StageRecord", "from jaxalign.stages.shared.base import Stage",
             f"RECORD = StageRecord('mine', {stage})"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    config = from_config_dict(BASE | {"stages": ("pretrain", f"{tmp_path / 'mine.py'}:RECORD")})
    with pytest.raises(UserError) as caught:
        pipeline.run(config, tmp_path / "run")
    assert sentence in str(caught.value) and not (tmp_path / "run/pretrain").exists()


def test_registering_a_taken_name_is_refused():
    with pytest.raises(UserError, match="the stage 'ppo' is already registered; choose another name"):
        STAGES.register(StageRecord("ppo", "mine:STAGE"))


def test_the_planner_uses_its_record():
    """One function describes its work for the estimate and for the compiler."""
    from jaxalign.parallel.sharding import one_device
    from jaxalign.planner.compiled import run_programs
    from jaxalign.planner.programs import Run, estimated_tasks
    from jaxalign.planner.shapes import policy_model
    from jaxalign.planner.stage_programs import lm_update

    def programs(run):
        return [lm_update(run, "mine", run.config.sft, run.examples, run.policy)]

    STAGES.register(StageRecord("mine", "mine:STAGE", programs=programs))
    try:
        config = from_config_dict(BASE | {"stages": ("pretrain", "mine")})
        found = estimated_tasks(Run(config, policy_model(config, one_device()), examples=7))
        assert [task.name for task in found] == ["pretrain update", "mine update"] and found[1].calls == 7
        compiled = run_programs(config, policy_model(config, one_device()))
        assert [program.name for program in compiled] == ["pretrain update (policy)", "mine update (policy)"]
    finally:
        STAGES.unregister("mine")
