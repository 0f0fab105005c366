"""A run that chooses the size of its micro-batches, and whether they share gathered weights."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
import time

import pytest

import jaxalign as ja
import jaxalign.planner.micro_batches
from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.parallel import distributed, hosts
from jaxalign.planner.hardware import chips
from jaxalign.planner.role_models import part_of
from jaxalign.stages.shared import micro_batches
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.micro_batches import with_micro_batches
from jaxalign.tracking.workdir import MICRO_BATCHES, read_run
from tests import processes
from tests.stages.ppo_of_prompts import config as placed_config
from tests.stages.ppo_of_prompts import write_inputs
from tests.trainers.small import language_model

SMALL = {"batch": 16, "iterations": 1, "epochs": 1, "advantages": "grpo", "group_size": 2, "checks": {"step_zero": False}}
PAIRS = {"batch": 32, "max_length": 64, "epochs": 1, "micro_batch_tokens": "auto"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, few_sampling_programs):
    return write_inputs(tmp_path_factory.mktemp("micro"))


def config(folder, tokens="auto", **changes):
    values = placed_config(folder, mesh={"fsdp": 2})
    values["ppo"] |= SMALL | {"micro_batch_tokens": tokens} | changes
    return from_config_dict(values)


def context(folder, directory, **changes):
    directory.mkdir(exist_ok=True)
    return StageContext(config(folder, **changes), directory.parent, directory, False)


@pytest.fixture
def attached(monkeypatch):
    """Make the simulated devices count as TPU chips with so many bytes, for which large micro-batches are the fastest: a tiny
    model loses more by padding than by reading its weights often."""
    monkeypatch.setattr(jaxalign.planner.micro_batches, "FILLED", 1e6)

    def describe(usable):
        cluster = dataclasses.replace(part_of(chips()["v5e"], 2), usable=float(usable))
        monkeypatch.setattr(micro_batches, "_cluster", lambda config: (cluster, ""))

    return describe


@pytest.fixture(scope="module")
def compiled_once():
    """Measures a config as a run does, the first time that a test asks for it."""
    return functools.cache(micro_batches._compiled_peak)


@pytest.fixture
def peaks(compiled_once, monkeypatch):
    """The peak of each size that was compiled."""
    compiled, seen = compiled_once, {}

    def measured(config, stage):
        seen[config.ppo.micro_batch_tokens] = compiled(config, stage)
        return seen[config.ppo.micro_batch_tokens]

    monkeypatch.setattr(micro_batches, "_compiled_peak", measured)
    return seen


@pytest.mark.slow
def test_on_a_cpu_the_run_is_that_with_the_default(folder, tmp_path, capsys):
    for name, tokens in (("auto", "auto"), ("usual", 0)):
        pipeline.run(config(folder, tokens), tmp_path / name)
    assert ("[ppo] config.ppo.micro_batch_tokens=auto: the default size, because it makes no difference to the speed of a CPU\n"
            in capsys.readouterr().out)
    metrics = [(tmp_path / name / "ppo" / "metrics.jsonl").read_text() for name in ("auto", "usual")]
    assert metrics[0] == metrics[1] and not (tmp_path / "auto" / "ppo" / MICRO_BATCHES).exists()
    recorded = json.loads((tmp_path / "auto" / "config.json").read_text())
    assert recorded["ppo"]["micro_batch_tokens"] == "auto"
    pipeline.run(config(folder), tmp_path / "auto")
    assert "[ppo] done, nothing to compute" in capsys.readouterr().out


@pytest.mark.slow
def test_the_compiler_confirms_the_choice_and_a_resumed_run_keeps_it(folder, tmp_path, attached, peaks, capsys):
    attached(1e9)
    chosen = with_micro_batches(context(folder, tmp_path / "ppo"), "ppo")
    tokens, said = chosen.config.ppo.micro_batch_tokens, capsys.readouterr().out
    assert f"[ppo] config.ppo.micro_batch_tokens=auto: {tokens} tokens per device" in said
    assert f"[ppo] compiled, the programs of this stage need {peaks[tokens] / 1e9:.3g} of 1 GB\n" in said
    assert list(peaks) == [tokens]
    assert from_config_dict(dataclasses.asdict(chosen.config)) == chosen.config
    (tmp_path / "ppo" / "metrics.jsonl").write_text('{"step": 0}\n')
    assert f"{tokens} tokens per device" in read_run(tmp_path).stage("ppo").choice
    attached(1.0)  # No size fits now.
    again = with_micro_batches(context(folder, tmp_path / "ppo"), "ppo")
    assert again.config == chosen.config and ", as in the interrupted run" in capsys.readouterr().out
    kept = json.loads((tmp_path / "ppo" / MICRO_BATCHES).read_text())
    (tmp_path / "ppo" / MICRO_BATCHES).write_text(json.dumps(kept | {"tokens": 2 * tokens}))  # By hand.
    for _ in range(2):  # The second start finds the sentence of the first one.
        edited = with_micro_batches(context(folder, tmp_path / "ppo"), "ppo")
        assert edited.config.ppo.micro_batch_tokens == 2 * tokens
        assert read_run(tmp_path).stage("ppo").choice == (
            f"config.ppo.micro_batch_tokens=auto: {2 * tokens} tokens per device, from {MICRO_BATCHES}")
    kept["where"]["mesh"]["offload"] = ["optimizer"]
    (tmp_path / "ppo" / MICRO_BATCHES).write_text(json.dumps(kept))
    other = with_micro_batches(context(folder, tmp_path / "ppo"), "ppo")
    assert other.config.ppo.micro_batch_tokens == 0 and read_run(tmp_path).stage("ppo").choice == ""


@pytest.mark.slow
def test_a_size_that_the_compiler_refuses_is_not_chosen(folder, tmp_path, attached, peaks, monkeypatch, capsys):
    """The compiler's peaks are above the estimate, which leaves out the fixed costs of tiny programs."""
    attached(1e9)
    most = with_micro_batches(context(folder, tmp_path / "most"), "ppo").config.ppo.micro_batch_tokens
    proposed = micro_batches._variants

    def within(limit):
        monkeypatch.setattr(micro_batches, "_variants", lambda *given: [
            variant._replace(usable=float(limit)) for variant in proposed(*given)])

    within(peaks[most] - 1)
    less = with_micro_batches(context(folder, tmp_path / "less"), "ppo").config.ppo.micro_batch_tokens
    assert less < most and peaks[less] < peaks[most]
    within(1)
    assert with_micro_batches(context(folder, tmp_path / "none"), "ppo").config.ppo.micro_batch_tokens == 0
    said = "the default size, because according to the compiler, none of the choices fits"
    assert min(peaks) == 64 and said in capsys.readouterr().out


@pytest.mark.parametrize(("name", "error"), [
    ("_variants", UserError("two widths differ")), ("_compiled_peak", RuntimeError("two widths differ")),
])
def test_a_run_for_which_nothing_can_be_chosen_keeps_the_default(folder, tmp_path, attached, monkeypatch, capsys, name, error):
    def fail(*_):
        raise error

    attached(1e9)
    monkeypatch.setattr(micro_batches, name, fail)
    assert with_micro_batches(context(folder, tmp_path / "ppo"), "ppo").config.ppo.micro_batch_tokens == 0
    assert (f"auto: the default size, because the plan failed ({type(error).__name__}: two widths differ)"
            in capsys.readouterr().out)


def test_a_failed_first_start_leaves_no_folder(folder, tmp_path, attached, monkeypatch):
    """The corrected config can then be run without --overwrite."""
    attached(1e9)
    monkeypatch.setattr(micro_batches, "_compiled_peak", lambda *_: 0)

    def fail(*_):
        raise RuntimeError("no prompts")

    with monkeypatch.context() as patch:
        patch.setattr("jaxalign.stages.ppo.PPOStage.run", fail)
        with pytest.raises(RuntimeError, match="no prompts"):
            pipeline.run(config(folder), tmp_path)
    assert not (tmp_path / "ppo").exists()


def test_other_sections_have_the_default(folder, tmp_path):
    """A stage of one's own may read them."""
    values = placed_config(folder, mesh={"fsdp": 2}, dpo={"micro_batch_tokens": "auto"})
    given = StageContext(from_config_dict(values), tmp_path, tmp_path, False)
    assert with_micro_batches(given, "ppo").config.dpo.micro_batch_tokens == 0


def test_a_stage_with_a_number_is_left_alone(folder, tmp_path):
    given = context(folder, tmp_path / "ppo", tokens=64)
    assert with_micro_batches(given, "ppo") is given and not list((tmp_path / "ppo").iterdir())


@pytest.fixture
def slow_network(attached, monkeypatch):
    """Make gathers so slow that weights stay gathered."""
    attached(1e9)
    cluster, _ = micro_batches._cluster(None)
    slow = dataclasses.replace(cluster, chip=dataclasses.replace(cluster.chip, link=1.0))
    monkeypatch.setattr(micro_batches, "_cluster", lambda config: (slow, ""))


def test_weights_that_the_compiler_refuses_to_keep_do_not_stay_gathered(folder, tmp_path, slow_network, monkeypatch, capsys):
    values = placed_config(folder, mesh={"fsdp": 2, "keep_gathered": "auto"})
    (tmp_path / "ppo").mkdir()
    monkeypatch.setattr(micro_batches, "_compiled_peak", lambda config, stage: 2 * 10**9)
    chosen = with_micro_batches(StageContext(from_config_dict(values), tmp_path, tmp_path / "ppo", False), "ppo")
    assert chosen.config.mesh.keep_gathered == "never"
    assert "config.mesh.keep_gathered=auto: never. Compiled, no faster choice with always fits" in capsys.readouterr().out


OWN = """
import dataclasses
from jaxalign.registry.stages import STAGES
RECORD = dataclasses.replace(STAGES.get("sft"), name="mine", learns_from=())
"""


@pytest.mark.slow
def test_the_compiler_confirms_that_weights_can_stay_gathered(folder, tmp_path, slow_network, peaks, capsys):
    """Here in a stage of one's own, which the config names by its file. Its programs are those of sft."""
    (tmp_path / "mine.py").write_text(OWN)
    values = placed_config(folder, mesh={"fsdp": 2, "keep_gathered": "auto"}, stages=(f"{tmp_path / 'mine.py'}:RECORD",))
    (tmp_path / "mine").mkdir()
    given = StageContext(from_config_dict(values), tmp_path, tmp_path / "mine", False)
    chosen = with_micro_batches(given, "mine")
    assert chosen.config.mesh.keep_gathered == "always" and chosen.config.ppo.micro_batch_tokens == 0
    said = capsys.readouterr().out
    assert "[mine] config.mesh.keep_gathered=auto: always. By the plan of the run, updates take 0." in said
    assert f"[mine] compiled, the programs of this stage need {peaks[0] / 1e9:.3g} of 1 GB\n" in said
    assert with_micro_batches(given, "mine").config == chosen.config and list(peaks) == [0]
    assert "config.mesh.keep_gathered=auto: always, as in the interrupted run" in capsys.readouterr().out
    assert with_micro_batches(given, "evaluate").config.mesh.keep_gathered == "never"  # It has no update.


def program() -> None:
    """The program of each of two processes, of which the second is late: each writes its choice and a later result."""
    group, (folder,) = distributed.take_flags(sys.argv[1:])
    folder = pathlib.Path(folder)
    with distributed.running(group, lambda error: None):
        cluster = dataclasses.replace(part_of(chips()["v5e"], 8), usable=1e9)
        micro_batches._cluster = lambda config: (cluster, "")
        values = placed_config(folder, mesh={"data": 8}, stages=("preference",), preference=PAIRS, ppo={}, reward={}, lora={})
        values["data"] = {"source": "preferences_jsonl", "train": "pairs.jsonl", "style": "hh"}
        given = StageContext(from_config_dict(values), folder, folder / "preference", False)
        time.sleep(2 * hosts.index())
        tokens = with_micro_batches(given, "preference").config.preference.micro_batch_tokens
        later = hosts.once(lambda: "later")
        (folder / f"{hosts.index()}.json").write_text(json.dumps([tokens, later]))


@pytest.mark.process
@pytest.mark.slow
def test_processes_choose_the_same_size_also_if_one_is_late(folder):
    (folder / "preference").mkdir()
    processes.run_well(2, ["-c", f"from {__name__} import program; program()", str(folder)])
    (tokens, later), other = (json.loads((folder / f"{number}.json").read_text()) for number in range(2))
    assert tokens > 0 and later == "later" and other == [tokens, later]


@pytest.mark.parametrize("trainer", [ja.PPO, ja.DPO, ja.RewardModel])
def test_the_python_trainers_refuse_auto(trainer):
    more = {"reward": lambda prompts, responses: [0.0] * len(prompts)} if trainer is ja.PPO else {}
    message = rf"{trainer.__name__}\(micro_batch_tokens\) is 'auto', which only a run of stages chooses"
    with pytest.raises(UserError, match=message):
        trainer(language_model(), micro_batch_tokens="auto", **more)
