"""The recipes of configs/cai: every variant passes the checks of a config and fits its devices."""

from __future__ import annotations

import re

import pytest

from jaxalign.errors import UserError
from jaxalign.plan import read_config
from jaxalign.planner.estimate import abstract_sharding
from jaxalign.planner.requests import planned_requests
from jaxalign.planner.search import Given
from jaxalign.planner.shapes import policy_model
from tests.planner.planned import cluster

# The published shape, and the devices of the variants that train adapters or all weights.
RECIPES = {
    "qwen3_0_6b": ("Qwen3-0.6B", {"lora": "v5e:1x1", "full": "v5e:2x4"}),
    "llama32_1b": ("Llama-3.2-1B", {"lora": "v5e:1x1", "full": "v5e:2x4"}),
    "llama31_8b": ("Llama-3.1-8B", {"lora": "v5e:4x4", "full": "v6e:8x8"}),
    "gemma2_9b": ("gemma-2-9b", {"lora": "v5e:2x4", "full": "v6e:4x4"}),
}
JUDGES = ("", ",judge=larger", ",judge=endpoint")


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("trained", ["lora", "full"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_variant_of_a_recipe_fits_its_devices(name, trained, judge):
    shape, topologies = RECIPES[name]
    config = read_config(["plan", f"--config=configs/cai/{name}.py:{trained}{judge}"], shape)
    devices = cluster(topologies[trained])
    mesh = config.mesh
    assert mesh.data * mesh.fsdp * mesh.tensor == devices.devices
    run = Given(config, policy_model(config, abstract_sharding(mesh), shape), devices, prompt=512, examples=20480).estimate()
    assert run.fits and not run.uncounted
    assert {task.task.stage for task in run.tasks} == {"revise", "sft", "compare", "preference", "ppo", "evaluate"}
    feedback = {"revise", "compare", "evaluate"}
    assert {task.task.stage for task in run.tasks if "judge" in task.task.runs} == (feedback if "larger" in judge else set())
    assert {each.stage for each in planned_requests(config, 512)} == (feedback if "endpoint" in judge else set())


def test_an_unknown_variant_is_refused():
    with pytest.raises(UserError, match=re.escape("'lora,judge=gpt' is not a variant of this recipe; choose one of lora; ")):
        read_config(["plan", "--config=configs/cai/llama32_1b.py:lora,judge=gpt"], "Llama-3.2-1B")
