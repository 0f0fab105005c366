"""Training steps are compiled in a thread before the weights are read, and the stages use these programs.

Here on one device; `test_end_to_end.py` has stages on a mesh, and `test_ppo.py` PPO on one device and on a mesh.
"""

from __future__ import annotations

import shutil

import jax
import pytest

from jaxalign.parallel.ahead import Ahead
from tests.compilations import SEEN, compiled
from tests.small_run import CONFIG, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("waiting")]

LORA = {"lora": {"rank": 2}}


def threads(name: str) -> list[str]:
    """The threads that compiled `name`, without their numbers."""
    return [thread.partition("_")[0] for thread in compiled(name)]


@pytest.fixture
def waiting(monkeypatch):
    """Begin without programs, and wait for each program that is compiled ahead."""
    add = Ahead.add

    def add_and_wait(self, *program):
        future = add(self, *program)
        assert future.result() is not None
        return future

    monkeypatch.setattr(Ahead, "add", add_and_wait)  # Weights this small would often be ready first.
    jax.clear_caches()  # The shared run may have been made in this process, with the same programs.
    SEEN.clear()


def from_the_shared_run(done, workdir, *stages: str):
    for stage in stages:
        shutil.copytree(done / stage, workdir / stage)


def test_pretrain_is_compiled_ahead(tmp_path):
    run(tmp_path, stages=("pretrain",), pretrain=CONFIG["pretrain"] | {"steps": 3})
    assert threads("lm_step") == ["compile"]


def test_sft_with_adapters_is_compiled_ahead(done, tmp_path):
    from_the_shared_run(done, tmp_path, "pretrain", "revise")
    run(tmp_path, **LORA, stages=("pretrain", "revise", "sft"))
    assert threads("lm_step") == ["compile"]


def test_preference_model_and_dpo_are_compiled_ahead(done, tmp_path):
    stages = "pretrain", "revise", "sft", "compare"
    from_the_shared_run(done, tmp_path, *stages)
    dpo = {"batch": 8, "epochs": 1, "max_length": 192, "held_out_share": 0.2}
    run(tmp_path, stages=(*stages, "preference", "dpo"), dpo=dpo)
    assert threads("preference_step") == ["compile"]
    assert threads("direct_step") == ["compile"]


def test_grpo_is_compiled_ahead(done, tmp_path):
    stages = "pretrain", "revise", "sft", "compare", "preference"
    from_the_shared_run(done, tmp_path, *stages)
    grpo = {"advantages": "grpo", "group_size": 2, "kl_in": "loss", "kl_estimator": "k3", "checks": {"step_zero": False}}
    run(tmp_path, stages=(*stages, "ppo"), ppo=CONFIG["ppo"] | grpo)
    for name in ("packed_experience", "packed_update"):
        assert threads(f"({name})") == ["compile"]
