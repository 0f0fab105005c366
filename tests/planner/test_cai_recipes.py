"""The recipes of configs/cai: every variant passes the checks of a config and fits its devices."""

from __future__ import annotations

import pathlib
import re

import pytest

from jaxalign.config import Config
from jaxalign.errors import UserError
from jaxalign.plan import read_config
from jaxalign.planner.estimate import RunEstimate, abstract_sharding
from jaxalign.planner.requests import planned_requests
from jaxalign.planner.search import Given
from jaxalign.planner.shapes import policy_model
from tests.doc_tables import tables
from tests.planner.planned import cluster

# The published shape, and the devices of the variants that train adapters or all weights.
RECIPES = {
    "qwen3_0_6b": ("Qwen3-0.6B", {"lora": "v5e:1x1", "full": "v5e:2x4"}),
    "llama32_1b": ("Llama-3.2-1B", {"lora": "v5e:1x1", "full": "v5e:2x4"}),
    "llama31_8b": ("Llama-3.1-8B", {"lora": "v5e:4x4", "full": "v6e:8x8"}),
    "gemma2_9b": ("gemma-2-9b", {"lora": "v5e:2x4", "full": "v6e:4x4"}),
}
TITLES = {"gemma-2-9b": "Gemma-2-9B"}
JUDGES = ("", ",judge=larger", ",judge=endpoint")


def read(name: str, variant: str) -> Config:
    return read_config(["plan", f"--config=configs/cai/{name}.py:{variant}"], RECIPES[name][0])


def estimated(name: str, variant: str) -> RunEstimate:
    """The plan of a variant for its devices."""
    config, (shape, topologies) = read(name, variant), RECIPES[name]
    policy = policy_model(config, abstract_sharding(config.mesh), shape)
    return Given(config, policy, cluster(topologies[variant.partition(",")[0]]), prompt=512, examples=20480).estimate()


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("trained", ["lora", "full"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_variant_of_a_recipe_fits_its_devices(name, trained, judge):
    run = estimated(name, trained + judge)
    assert run.fits and not run.uncounted
    mesh = run.config.mesh
    assert mesh.data * mesh.fsdp * mesh.tensor == run.cluster.devices
    assert {task.task.stage for task in run.tasks} == {"revise", "sft", "compare", "preference", "ppo", "evaluate"}
    feedback = {"revise", "compare", "evaluate"}
    assert {task.task.stage for task in run.tasks if "judge" in task.task.runs} == (feedback if "larger" in judge else set())
    assert {each.stage for each in planned_requests(run.config, 512)} == (feedback if "endpoint" in judge else set())


def test_an_unknown_variant_is_refused():
    with pytest.raises(UserError, match=re.escape("'lora,judge=gpt' is not a variant of this recipe; choose one of lora; ")):
        read("llama32_1b", "lora,judge=gpt")


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_has_the_figures_of_the_plan(name):
    """Those of the variant full, to save time."""
    shape, topologies = RECIPES[name]
    page = (pathlib.Path(__file__).parents[2] / "docs" / "cai_recipes.md").read_text(encoding="utf-8")
    row, = (row for table in tables(page) for row in table if row.get(TITLES.get(shape, shape)) == "full")
    run = estimated(name, "full")
    assert row["devices"] == topologies["full"] and float(row["peak, GB"]) == pytest.approx(run.peak / 1e9, abs=0.051)
    assert float(row["all, hours"]) == pytest.approx(run.seconds / 3600, abs=0.0051)


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_of_scoring_is_close_to_the_compilers_figure(name):
    """The compiler's figure is on the page. The program also casts and gathers the weights of the preference model."""
    shape, _ = RECIPES[name]
    page = (pathlib.Path(__file__).parents[2] / "docs" / "cai_recipes.md").read_text(encoding="utf-8")
    title = f"{TITLES.get(shape, shape)}, GB"
    row = next(row for table in tables(page) for row in table if row.get(title) == "ppo: scoring")
    planned, compiled = map(float, row["full"].split(" / "))
    peak = next(task.peak for task in estimated(name, "full").tasks if task.task.name == "ppo score") / 1e9
    assert peak == pytest.approx(planned, abs=0.051) and peak == pytest.approx(compiled, rel=0.1)
