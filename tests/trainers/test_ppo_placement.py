"""PPO as a library object with roles on devices of their own."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from jaxalign.config import Checks, Mesh, from_config_dict
from jaxalign.errors import UserError
from jaxalign.parallel.sharding import make_sharding
from jaxalign.planner.hardware import chips
from jaxalign.planner.shapes import policy_model
from jaxalign.trainers.inputs import peak_flops
from jaxalign.trainers.ppo import PPO
from jaxalign.trainers.reward_model import RewardModel
from tests.trainers.small import PAIRS, language_model

pytestmark = pytest.mark.mesh

PROMPTS = [row["prompt"] for row in PAIRS]
FIELDS = {"iterations": 2, "batch": 8, "max_new_tokens": 8, "epochs": 1, "minibatches": 1, "missing_eos": "none",
          "checks": Checks(step_zero=False),
          "advantages": "rloo", "group_size": 2}


def brief(prompts, responses, **columns):
    return [-len(response) / 10 for response in responses]


@pytest.mark.slow
def test_a_placement_gives_the_metrics_of_one_device():
    scorer = RewardModel(language_model(), steps=1, batch=4, members=1)
    for _ in scorer.fit(PAIRS):
        pass
    entries = ["policy=0", "reference=1", "reward=2-3:data=2", "generator=4-5:data=2"]
    for place in ("flat", entries):
        trainer = PPO(language_model(), reward=scorer, placement=place, **FIELDS)
        rows = [step.metrics for step in trainer.fit(PROMPTS)]
        if place == "flat":
            wanted = rows
    for mine, theirs in zip(rows, wanted, strict=True):
        for name in ("score", "kl_k1", "policy_loss", "entropy", "response_length"):
            assert mine[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-5), name
    assert all(x.devices() == {jax.devices()[0]} for x in jax.tree.leaves(trainer.policy.params))


@pytest.mark.parametrize(("placement", "mesh", "message"), [
    ("apart", None, r"PPO\(placement\) is 'apart'; flat, interleave, separate or a list of entries"),
    (3, None, r"PPO\(placement\)"),
    (["policy=1", "reference=0"], None, "load it with load_model"),
    (["policy=0"], None, "reference has no devices"),
    ("separate", {"data": 2}, "has 2 devices, but policy has 4"),
])
def test_a_placement_that_is_not_possible_is_refused(placement, mesh, message):
    model = language_model() if mesh is None else language_model(mesh=Mesh(**mesh))
    with pytest.raises(UserError, match=message):
        PPO(model, reward=brief, placement=placement, **FIELDS)


def test_the_peak_counts_the_devices_of_all_roles_once(monkeypatch):
    """Two devices of the policy, four of the generator, of which two are the policy's: four devices of 1 TFLOP/s each."""
    chip = dataclasses.replace(chips()["L4"], f32_flops=1e12)
    monkeypatch.setattr("jaxalign.trainers.inputs.chip_of", lambda kind: chip)
    devices = jax.devices()
    model = policy_model(from_config_dict({"stages": ("ppo",), "model": {"compute_dtype": "float32"}}),
                         make_sharding(Mesh(data=2), devices[:2]))
    generator = make_sharding(Mesh(data=4), devices[:4])
    assert peak_flops(model) == 2e12
    assert peak_flops(model, {"policy": model.sharding, "generator": generator}) == 4e12
    monkeypatch.setattr("jaxalign.trainers.inputs.chip_of", lambda kind: None)
    assert peak_flops(model, {"policy": model.sharding}) == 0.0
