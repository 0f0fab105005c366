"""The programs of a run: their list, that each can be lowered, and that the stages call them with these shapes."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from jaxalign.config import Config
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import LoraAdapters
from jaxalign.parallel.sharding import make_sharding, one_device
from jaxalign.planner.compiled import run_programs
from jaxalign.planner.programs import Run, device_bytes, estimated_tasks
from jaxalign.planner.shapes import architecture, policy_model, published_shapes
from jaxalign.rl import experience, step_zero
from jaxalign.rl import update as ppo_step
from jaxalign.rollout import ring, session
from tests import tiny
from tests.planner.tiny_config import TINY, config
from tests.ppo_iterations import iterate


def programs(**changes):
    made = config(**changes)
    return run_programs(made, policy_model(made, make_sharding(made.mesh)))


def names(found) -> list[str]:
    return [program.name for program in found]


@pytest.mark.slow
def test_every_stage_has_its_steps_and_each_can_be_lowered():
    found = programs()
    assert {program.stage for program in found} == set(TINY["stages"])
    for wanted in ("pretrain update (policy)", "sft update (policy)", "preference update (preference model)",
                   "dpo scoring (reference)", "dpo update (policy)", "compare labelling (feedback model)",
                   "online_dpo update (policy)", "reward_distill update (student)", "ppo resharding (policy)",
                   "ppo sampling (policy)", "ppo prefill (policy)", "ppo decode (policy)",
                   "ppo scoring (reference, policy, critic, preference model)", "ppo checks (policy, reference)",
                   "ppo update (policy, critic)"):
        assert names(found).count(wanted) == 1, wanted
    for program in found:
        assert "module @jit" in program.step.lower(*program.arguments).as_text()[:200], program.name


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "wanted"), [
    ({"lora": {"rank": 2, "base": "nf4"}}, "ppo update (policy, critic)"),
    ({"lora": {"rank": 2, "base": "int8"}, "preference": {"members": 2}},
     "ppo scoring (reference, policy, critic, preference model)"),
    ({"mesh": {"offload": ["frozen"]}}, "ppo reward (preference model)"),
    ({"ppo": {"critic": "shared"}}, "ppo update (policy, critic)"),
    ({"ppo": {"advantages": "remax", "kl_in": "loss", "kl_estimator": "full"}}, "ppo update (policy)"),
    ({"reward": {"source": "distilled+ai_feedback"}, "world": {"ratings": 0.1}}, "ppo labelling (feedback model)"),
    ({"reward": {"source": "verifier"}, "data": {"source": "arithmetic"}, "stages": ["pretrain", "ppo"],
      "mesh": {"tensor": 1}, "world": {"vocab_size": 768}},
     "ppo scoring (reference, policy, critic)"),
    ({"mesh": {"data": 1, "fsdp": 8, "tensor": 1, "zero": 1, "generation": "training"}, "stages": ["preference", "ppo"],
      "ppo": {"minibatches": 1}}, "ppo sampling (policy)"),
])
def test_programs_of_ppo_for_every_way_to_train_and_every_reward(changes, wanted):
    """The shapes of each program fit; the test above lowers the same steps."""
    found = [program for program in programs(**changes) if program.stage == "ppo"]
    assert wanted in names(found)
    for program in found:
        if program.phase != "checks" or "lora" in changes or "critic" in changes.get("ppo", {}):
            program.step.trace(*program.arguments)


def test_a_judge_of_the_users_runs_no_program_and_holds_no_weights():
    judge = str(pathlib.Path(__file__).parents[1] / "extending" / "plugins" / "judge.py") + ":Brevity"
    found = programs(feedback={"judge": judge}, stages=["compare", "online_dpo"])
    assert {program.name for program in found} and not [name for name in names(found) if "feedback model" in name]
    assert not [program.name for program in found if {"base", "feedback model"} & program.held.keys()]
    changes = config(feedback={"judge": judge}, stages=["compare"])
    (task,) = estimated_tasks(Run(changes, policy_model(changes, one_device())))
    assert task.phase == "generate" and "labeller" not in task.stays


def test_only_the_config_of_an_outside_reward_model_is_read(tmp_path):
    fields = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "vocab_size": 64,
              "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 32, "max_position_embeddings": 24}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    reward = {"source": "model", "model": str(tmp_path), "model_dtype": "bfloat16", "model_batch": 3}
    (found,) = (program for program in programs(reward=reward, stages=["ppo"]) if program.phase == "reward")
    scorer, weights, tokens, _ = found.arguments
    # Three texts are padded to four, the number of batch shards; a text has at most the model's 24 positions.
    assert tokens.shape == (4, 24) and scorer.model.config.embed == 16
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {np.dtype("bfloat16")}
    found.step.lower(*found.arguments)


def called(monkeypatch, module, name) -> list:
    """Record the arguments of every call of a jitted function by that module."""
    calls, real = [], getattr(module, name)

    def record(*arguments):
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(module, name, record)
    return calls


@pytest.mark.slow
def test_ppo_calls_its_steps_with_the_planned_shapes(monkeypatch):
    """Run an iteration of the stage itself on one device, with its calls recorded."""
    calls = {"chunk": called(monkeypatch, ring, "decode_chunk"), "prefill": called(monkeypatch, session, "prefill"),
             "scoring": called(monkeypatch, experience, "packed_experience"),
             "checks": called(monkeypatch, step_zero, "step_zero_values"),
             "update": called(monkeypatch, ppo_step, "packed_update")}
    iterate(steps=1)
    setup = tiny.setup(epochs=1, minibatches=1)
    made = dataclasses.replace(config(), ppo=setup.config, stages=("preference", "ppo"),
                               model=dataclasses.replace(config().model, max_length=Config().model.max_length))
    found = {p.phase: p for p in run_programs(made, setup.policy, prompt=8) if p.stage == "ppo"}
    for phase, name in (("sampling", "chunk"), ("prefill", "prefill"), ("scoring", "scoring"), ("checks", "checks"),
                        ("update", "update")):
        expected, given = (jax.tree.leaves(x, is_leaf=lambda x: x is None) for x in (found[phase].arguments, calls[name][0]))
        arrays = [(a, b) for a, b in zip(expected, given, strict=False) if isinstance(a, jax.ShapeDtypeStruct)]
        assert len(arrays) > 3
        for a, b in arrays:
            assert (a.shape, a.dtype) == (b.shape, b.dtype), (phase, a, b)


def test_the_bytes_that_a_device_holds():
    """A device has its shard of each kernel, and the reference adds no second copy of the base under adapters."""
    (update,) = (p for p in programs(lora={"rank": 2}, stages=["ppo"]) if p.phase == "update")
    assert set(update.held) == {"base", "reference", "policy", "policy optimizer", "critic", "critic optimizer",
                                "preference model"}
    query = update.held["base"]["blocks"]["attention"]["query"]  # [2, 16, 4, 4] float32 over fsdp 2 and tensor 2
    assert device_bytes(query) == 2 * 16 * 4 * 4 * 4 // 4
    assert device_bytes(update.held["reference"]) == 0


@pytest.mark.parametrize("changes", [{}, {"ppo": {"kl_estimator": "full", "kl_in": "loss"}}])
def test_a_base_is_passed_to_a_program_once(changes):
    """Several models share the base, but an argument passed twice counts twice against a device's memory."""
    for program in programs(lora={"rank": 2}, **changes):
        base = {id(leaf) for leaf in jax.tree.leaves(program.held.get("base", {}))}
        passed = [id(leaf) for leaf in jax.tree.leaves(program.arguments) if id(leaf) in base]
        assert len(passed) == len(set(passed)), program.name


def test_a_shared_trunk_is_passed_to_scoring_once():
    for program in programs(stages=["ppo"], ppo={"critic": "shared"}):
        own = {id(leaf) for leaf in jax.tree.leaves(program.held["policy"])}
        passed = [id(leaf) for leaf in jax.tree.leaves(program.arguments) if id(leaf) in own]
        assert len(passed) == len(set(passed)), program.name


def test_offloaded_weights_are_on_the_devices_only_while_they_are_used():
    found = {p.phase: p for p in programs(mesh={"offload": ["optimizer", "frozen"]}, stages=["preference", "ppo"])
             if p.stage == "ppo"}
    trained = {"policy", "critic"}
    assert set(found["sampling"].held) == trained | {"policy for sampling"}
    assert set(found["scoring"].held) == trained  # the reference is a separate argument
    assert set(found["update"].held) == trained | {"policy optimizer", "critic optimizer"}


def test_prompts_that_leave_no_space_for_new_tokens_are_refused():
    made = config(stages=["ppo"])
    policy = policy_model(made, make_sharding(made.mesh))
    with pytest.raises(UserError, match=r"prompts of 30 tokens and responses of 8 exceed config.model.max_length \(32\)"):
        run_programs(made, policy, prompt=30)


@pytest.mark.parametrize(("name", "millions"), [("Qwen3-0.6B", 596), ("Qwen3-8B", 8191), ("Llama-3.2-1B", 1236),
                                                ("Llama-3.1-8B", 8030), ("Llama-3.1-70B", 70554), ("gemma-2-9b", 9242),
                                                ("gemma-2-27b", 27227)])
def test_published_shapes_have_the_published_number_of_parameters(name, millions):
    model = policy_model(config(lora={"rank": 0}), one_device(), name)
    counted = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(model.abstract()))
    assert counted / 1e6 == pytest.approx(millions, abs=0.5) and name in published_shapes()


def test_an_unknown_shape_is_refused_and_config_choices_apply_to_any_shape():
    with pytest.raises(UserError, match="shape is 'Llama-9'; it must be one of Qwen3-0.6B"):
        architecture(config(), "Llama-9")
    made = config(model={"remat": True, "compute_dtype": "bfloat16"}, lora={"rank": 4, "alpha": 8.0})
    model = policy_model(made, one_device(), "Llama-3.2-1B")
    assert model.config.remat and model.config.compute_dtype == "bfloat16" and model.lora == LoraAdapters(4, 8.0, ("*",))
