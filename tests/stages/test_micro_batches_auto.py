"""A run that chooses the size of its micro-batches: micro_batch_tokens=auto."""

from __future__ import annotations

import dataclasses
import json

import pytest

import jaxalign as ja
from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.planner.hardware import chips
from jaxalign.planner.role_models import part_of
from jaxalign.stages.shared import micro_batches
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.micro_batches import CHOICE, with_micro_batches
from tests.folders import write_model
from tests.stages.test_placements import config as placed_config
from tests.trainers.small import language_model

SMALL = {"batch": 16, "iterations": 1, "epochs": 1, "advantages": "grpo", "group_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("micro")
    write_model(root / "model")
    (root / "rl.txt").write_text("".join(f"What is {i} + {i}?\n" for i in range(16)))
    return root


def config(folder, tokens="auto", **changes):
    values = placed_config(folder, mesh={"fsdp": 2})
    values["ppo"] |= SMALL | {"micro_batch_tokens": tokens} | changes
    return from_config_dict(values)


def context(folder, directory, **changes):
    directory.mkdir(exist_ok=True)
    return StageContext(config(folder, **changes), directory.parent, directory, False)


@pytest.fixture
def attached(monkeypatch):
    """Make the simulated devices count as TPU chips with so many bytes."""
    def describe(usable):
        cluster = dataclasses.replace(part_of(chips()["v5e"], 2), usable=float(usable))
        monkeypatch.setattr(micro_batches, "_cluster", lambda: (cluster, ""))

    return describe


def test_on_a_cpu_the_run_is_that_with_the_default(folder, tmp_path, capsys):
    for name, tokens in (("auto", "auto"), ("usual", 0)):
        pipeline.run(config(folder, tokens), tmp_path / name)
    assert ("[ppo] config.ppo.micro_batch_tokens=auto: the default, because a CPU is not faster with a larger size\n"
            in capsys.readouterr().out)
    metrics = [(tmp_path / name / "ppo" / "metrics.jsonl").read_text() for name in ("auto", "usual")]
    assert metrics[0] == metrics[1]
    recorded = json.loads((tmp_path / "auto" / "config.json").read_text())
    assert recorded["ppo"]["micro_batch_tokens"] == "auto"
    pipeline.run(config(folder), tmp_path / "auto")
    assert "[ppo] done, nothing to compute" in capsys.readouterr().out


def test_the_compiler_confirms_the_choice_and_a_resumed_run_keeps_it(folder, tmp_path, attached, capsys):
    attached(1e9)
    chosen = with_micro_batches(context(folder, tmp_path / "ppo"), "ppo")
    tokens, said = chosen.config.ppo.micro_batch_tokens, capsys.readouterr().out
    assert f"config.ppo.micro_batch_tokens=auto: {tokens} tokens per device" in said and "the compiler's 0.0 GB" in said
    assert tokens > 0 and from_config_dict(dataclasses.asdict(chosen.config)) == chosen.config
    attached(1.0)  # The choice would be another one now.
    again = with_micro_batches(context(folder, tmp_path / "ppo"), "ppo")
    assert again.config == chosen.config and "as in the interrupted run" in capsys.readouterr().out
    kept = json.loads((tmp_path / "ppo" / CHOICE).read_text())
    kept["where"]["mesh"]["fsdp"] = 8
    (tmp_path / "ppo" / CHOICE).write_text(json.dumps(kept))
    other = with_micro_batches(context(folder, tmp_path / "ppo"), "ppo")
    assert other.config.ppo.micro_batch_tokens < tokens


def test_a_size_that_the_compiler_refuses_is_not_chosen(folder, tmp_path, attached, monkeypatch, capsys):
    """The estimate proposes a size for unlimited memory; the compiler's peak of that size then does not fit."""
    compiled, seen = micro_batches._compiled, {}

    def measured(config, stage, policy, usable):
        programs = compiled(config, stage, policy, usable)
        seen[config.ppo.micro_batch_tokens] = max(program.total for program in programs)
        return [dataclasses.replace(program, usable=limit) for program in programs]

    attached(1e9)
    monkeypatch.setattr(micro_batches, "_compiled", measured)
    limit = 10**9
    most = with_micro_batches(context(folder, tmp_path / "most"), "ppo").config.ppo.micro_batch_tokens
    limit = seen[most] - 1
    less = with_micro_batches(context(folder, tmp_path / "less"), "ppo").config.ppo.micro_batch_tokens
    assert less < most and seen[less] <= limit
    limit = 1
    least = with_micro_batches(context(folder, tmp_path / "least"), "ppo").config.ppo.micro_batch_tokens
    assert least == min(seen) and "the compiler needs more memory than that for each size" in capsys.readouterr().out


def test_a_config_that_cannot_be_estimated_keeps_the_default(folder, tmp_path, attached, monkeypatch, capsys):
    def refuse(*_):
        raise UserError("the sum of two widths is odd")

    attached(1e9)
    monkeypatch.setattr(micro_batches, "choices", refuse)
    assert with_micro_batches(context(folder, tmp_path / "ppo"), "ppo").config.ppo.micro_batch_tokens == 0
    assert "auto: the default, because the sum of two widths is odd" in capsys.readouterr().out


def test_a_stage_with_a_number_is_left_alone(folder, tmp_path):
    given = context(folder, tmp_path / "ppo", tokens=64)
    assert with_micro_batches(given, "ppo") is given and not list((tmp_path / "ppo").iterdir())


@pytest.mark.parametrize("trainer", [ja.PPO, ja.DPO, ja.RewardModel])
def test_the_python_trainers_refuse_auto(trainer):
    more = {"reward": lambda prompts, responses: [0.0] * len(prompts)} if trainer is ja.PPO else {}
    message = rf"{trainer.__name__}\(micro_batch_tokens\) is 'auto', which only a run of stages chooses"
    with pytest.raises(UserError, match=message):
        trainer(language_model(), micro_batch_tokens="auto", **more)
