"""Several rounds in the pipeline, with small fake stages."""

from __future__ import annotations

import json

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.registry.stages import policies_before
from jaxalign.stages.shared.base import Stage, StageContext
from jaxalign.stages.shared.manifest import read_manifest

STAGES = ("pretrain", "sft", "compare", "dpo", "evaluate", "report")


class Recording(Stage):
    """Writes the folders that it reads, and its start, to its folder."""

    def __init__(self, name, config_fields=(), inputs=lambda config: ()):
        self.name, self.config_fields, self.read, self.fails = name, config_fields, inputs, False

    def inputs(self, config):
        return self.read(config)

    def run(self, context: StageContext):
        read = [str(context.input_directory(name).relative_to(context.workdir)) for name in self.inputs(context.config)]
        start = context.start or next(iter(policies_before(context.config.stages, self.name)[-1:]), "")
        (context.directory / "read.json").write_text(json.dumps({"read": read, "start": start, "seed": context.stream_seed}))
        if self.fails:
            self.fails = False
            raise KeyboardInterrupt


@pytest.fixture
def stages():
    from jaxalign.stages import evaluate, report

    made = [
        Recording("pretrain"), Recording("sft", ("sft",), lambda config: ("pretrain",)),
        Recording("compare", ("compare",), lambda config: ("sft",)),
        Recording("dpo", ("dpo.beta",), lambda config: ("sft", "compare")),
        Recording("evaluate", ("evaluate",), evaluate.EvaluateStage().inputs),
        Recording("report", (), report.ReportStage().inputs),
    ]
    return {stage.name: stage for stage in made}


def config(**values):
    return from_config_dict({"stages": STAGES, "compile_cache": None} | values)


def run(stages, workdir, **values):
    overwrite = values.pop("overwrite", False)
    return pipeline.run(config(**values), workdir, overwrite, load=stages.__getitem__)


def read(folder):
    return json.loads((folder / "read.json").read_text())


def contents(workdir):
    return {path.relative_to(workdir): path.read_bytes() for path in workdir.rglob("*") if path.is_file()}


def test_a_round_reads_its_own_stages_and_starts_from_the_last_policy(stages, tmp_path, capsys):
    result = run(stages, tmp_path, rounds=3)
    assert list(result.stages) == ["pretrain", "sft", "compare", "dpo", "round-2/compare", "round-2/dpo", "round-3/compare",
                                   "round-3/dpo", "evaluate", "report"]
    for number, start in ((2, "dpo"), (3, "round-2/dpo")):
        assert read(tmp_path / f"round-{number}/compare")["start"] == start
        assert read(tmp_path / f"round-{number}/dpo")["start"] == start
        assert f"round-{number}/compare" in read(tmp_path / f"round-{number}/dpo")["read"]
        assert start in read_manifest(tmp_path / f"round-{number}/compare").inputs
    read_by_evaluate = {"pretrain", "sft", "compare", "dpo", "round-2/dpo", "round-3/dpo"}
    assert set(read_manifest(tmp_path / "evaluate").inputs) == read_by_evaluate
    assert set(read_manifest(tmp_path / "report").inputs) == set(result.stages) - {"report"}
    assert "[compare, round 2] starting\n[compare, round 2] finished" in capsys.readouterr().out


def test_every_round_has_its_own_random_numbers(stages, tmp_path):
    run(stages, tmp_path, rounds=3, seed=5)
    seeds = [read(tmp_path / folder / "compare")["seed"] for folder in ("", "round-2", "round-3")]
    assert seeds[0] == 5 and len(set(seeds)) == 3
    assert seeds == [read(tmp_path / folder / "dpo")["seed"] for folder in ("", "round-2", "round-3")]


def test_another_round_can_be_added_to_a_finished_run(stages, tmp_path, capsys):
    run(stages, tmp_path)
    before = contents(tmp_path)
    capsys.readouterr()
    run(stages, tmp_path, rounds=2)
    out = capsys.readouterr().out.splitlines()
    assert out[:6] == [
        f"[evaluate] will include the new rounds; the old folder is now {tmp_path}/evaluate.old-1",
        f"[report] will include the new rounds; the old folder is now {tmp_path}/report.old-1",
        *(f"[{name}] done, nothing to compute" for name in STAGES[:4]),
    ]
    after = contents(tmp_path)
    kept = [path for path in before if path.parts[0] in STAGES[:4]]
    assert kept and all(after[path] == before[path] for path in kept)
    run(stages, tmp_path, rounds=3)
    read_by_evaluate = {"pretrain", "sft", "compare", "dpo", "round-2/dpo", "round-3/dpo"}
    assert set(read_manifest(tmp_path / "evaluate").inputs) == read_by_evaluate


def test_a_finished_run_of_several_rounds_computes_nothing(stages, tmp_path):
    run(stages, tmp_path, rounds=2)
    before = contents(tmp_path)

    def unloadable(name):
        raise AssertionError(f"stage {name} was loaded")

    pipeline.run(config(rounds=2), tmp_path, load=unloadable)
    assert contents(tmp_path) == before


def test_an_interrupted_round_continues(stages, tmp_path, capsys):
    run(stages, tmp_path)
    stages["dpo"].fails = True
    with pytest.raises(KeyboardInterrupt):
        run(stages, tmp_path, rounds=2)
    capsys.readouterr()
    run(stages, tmp_path, rounds=2)
    out = capsys.readouterr().out
    assert "[compare, round 2] done, nothing to compute\n[dpo, round 2] continuing" in out
    assert read_manifest(tmp_path / "round-2/dpo").status == "done"


def test_fewer_rounds_or_other_settings_are_refused(stages, tmp_path):
    run(stages, tmp_path, rounds=2)
    before = contents(tmp_path)
    read_before = r"\[evaluate\] it read pretrain, sft, dpo, round-2/dpo, compare and would now read .*, dpo, compare\n"
    with pytest.raises(UserError, match=read_before):
        run(stages, tmp_path)
    with pytest.raises(UserError) as caught:
        run(stages, tmp_path, rounds=2, dpo={"beta": 0.5})
    for line in ("[dpo] config.dpo.beta was", "[compare, round 2] its input dpo changes", "[dpo, round 2] config.dpo.beta was"):
        assert line in str(caught.value)
    with pytest.raises(UserError, match=r"\[dpo\] config.dpo.beta was"):  # A new round does not hide other differences.
        run(stages, tmp_path, rounds=3, dpo={"beta": 0.5})
    assert contents(tmp_path) == before
    run(stages, tmp_path, rounds=2, dpo={"beta": 0.5}, overwrite=True)
    assert (tmp_path / "round-2/dpo.old-1").is_dir() and not (tmp_path / "compare.old-1").exists()
