"""The TPU compiler compiles the programs of each role for the topology of the role."""

from __future__ import annotations

import importlib.util

import jax
import pytest

from jaxalign.config import from_config_dict
from jaxalign.parallel.sharding import make_sharding
from jaxalign.planner.compiled_placed import compile_for, stage_targets
from jaxalign.planner.compiled_report import text, to_json
from jaxalign.planner.estimate import abstract_sharding
from jaxalign.planner.hardware import topology_cluster
from jaxalign.planner.search import Given
from jaxalign.planner.shapes import policy_model
from jaxalign.planner.topology import parse_topologies
from tests.planner.tiny_config import SIZES

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
# The compilation cache cannot load programs for devices that are absent.
pytestmark = [pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")]


def given(stages, *entries: str) -> tuple[Given, list]:
    groups = parse_topologies("policy+critic=v5p:2x2x1,reference+generator=v5e:2x2")
    config = from_config_dict({
        "stages": stages, "model": SIZES, "ppo": {"max_new_tokens": 8, "batch": 8}, "feedback": {"max_reasoning_tokens": 8},
        "online_dpo": {"max_new_tokens": 8, "batch": 8},
        "reward": {"source": "callable", "callable": "mine.py:score"} if "ppo" in stages else {},
        "placement": {"strategy": "custom", "roles": entries},
    })
    first, *others = (topology_cluster(topology) for _, topology in groups)
    policy = policy_model(config, abstract_sharding(config.mesh))
    return Given(config, policy, first, others=tuple(others)), [topology for _, topology in groups]


@pytest.mark.slow
@needs_libtpu
def test_roles_on_two_kinds_of_tpu():
    own, topologies = given(("ppo",), "policy+critic=0-3:fsdp=4", "reference=4-5", "generator=6-7:data=2")
    found = compile_for(own, topologies, programs=("scoring",))
    # v5e: 15.75 GiB are usable on a chip, v5p: 95.73 (docs/compiled.md).
    assert [(one.name, round(one.usable / 2**30, 2)) for one in found] == [
        ("ppo scoring (reference) on 4-5 of v5e:2x2", 15.75), ("ppo scoring (critic) on 0-3 of v5p:2x2x1", 95.73),
    ]
    assert all(one.fits and one.memory.arguments > 0 for one in found)
    assert "ppo scoring (critic) on 0-3 of v5p:2x2x1" in text(found)
    assert [one["devices"] for one in to_json(found)] == ["4-5 of v5e:2x2", "0-3 of v5p:2x2x1"]


@pytest.mark.mesh
def test_roles_of_online_dpo_have_their_own_programs():
    own, _ = given(("online_dpo",), "policy=0-1:data=2", "reference=2-3", "judge=4-5", "generator=6-7:data=2")
    like = make_sharding(own.config.mesh, jax.devices()[:1])
    found = {}
    for program, _, _, where in stage_targets(own, "online_dpo", like, jax.devices()):
        arrays = [x for x in jax.tree.leaves(program.arguments) if isinstance(x, jax.ShapeDtypeStruct)]
        found[program.phase, program.role] = {device.id for x in arrays for device in x.sharding.device_set}
        first, last = map(int, where.partition(" ")[0].split("-"))
        assert found[program.phase, program.role] == {first, last}
    assert found["scoring", "policy"] == found["update", "policy"] == {0, 1} and found["scoring", "reference"] == {2, 3}
    assert found["sampling", "generator"] == {6, 7} and found["labelling", "feedback model"] == {4, 5}
