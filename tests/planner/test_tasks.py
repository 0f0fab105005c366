"""The number of calls of each step in a run, counted by hand from the config."""

from __future__ import annotations

import dataclasses

import pytest
from planner.planned import config, model

from jaxalign.planner.estimate import abstract_sharding
from jaxalign.planner.memory import BatchShape
from jaxalign.planner.programs import Run, estimated_tasks


def tasks(chosen, **how):
    policy = dataclasses.replace(model(), sharding=abstract_sharding(chosen.mesh))
    return estimated_tasks(Run(chosen, policy, **how))


def found(*flags: str, **how):
    return {task.name: task for task in tasks(config(*flags), **how)}


def test_ppo_of_two_hundred_iterations():
    ppo = found("--config.ppo.micro_batch_tokens=768")
    names = [name for name in ppo if name.startswith("ppo")]
    assert names == ["ppo generate", "ppo reward", "ppo score", "ppo checks", "ppo update"] and ppo["ppo checks"].calls == 1
    # The checks read two micro-batches of one row per device, on 16 devices.
    assert (ppo["ppo checks"].rows, ppo["ppo checks"].micro) == (BatchShape(32, 768), 2)
    assert ppo["ppo generate"].rows == BatchShape(64, 768 - 256, 256) and ppo["ppo generate"].calls == 200
    update = ppo["ppo update"]  # 64 rows in 2 minibatches, each in 2 parts of one row per device on 16 devices, for 2 epochs.
    assert (update.rows, update.micro, update.steps, update.counted) == (BatchShape(32, 768), 2, 4, 256)
    assert update.trains == ("policy", "critic")
    assert set(update.stays) == {"policy", "critic", "reference", "preference model"}
    assert found(prompt=100)["ppo generate"].rows == BatchShape(64, 100, 256)
    assert set(ppo) - set(found("--config.ppo.checks.step_zero=False")) == {"ppo checks"}


def test_evaluate_holds_the_reference_and_the_preference_model():
    evaluated = found()["evaluate generate"]
    assert set(evaluated.stays) == {"policy", "reference", "preference model"}


def test_without_a_critic_there_are_no_critic_weights():
    grpo = ("--config.ppo.advantages=grpo", "--config.ppo.group_size=4", "--config.ppo.critic_optimizer.learning_rate=0.0005")
    update = found(*grpo)["ppo update"]
    assert update.trains == ("policy",) and "critic" not in update.stays
    shared = found("--config.ppo.critic=shared", "--config.ppo.critic_optimizer.learning_rate=0.0005")["ppo update"]
    assert shared.trains == ("policy",)


def test_steps_that_depend_on_data_are_counted_if_its_size_is_given():
    assert found()["sft update"].calls is None
    entries = found(examples=1000)
    assert entries["sft update"].calls == 1000 / 16 + 0.5  # 62.5 batches
    assert entries["preference update"].calls == -(-1000 * 0.78 * 3 // 16)


def test_all_steps_of_the_quickstart_but_sft_are_counted():
    made = tasks(config(file="configs/quickstart.py"))
    assert all(task.calls for task in made if task.stage != "sft")
    names = [task.name for task in made]
    assert names[:3] == ["pretrain update", "revise generate", "sft update"] and names.count("compare generate") == 2


@pytest.mark.parametrize(("flags", "fused"), [
    ((), ("preference model",)),
    (("--config.preference.members=3",), ("preference model",) * 3),
    (("--config.ppo.advantages=remax", "--config.ppo.critic_optimizer.learning_rate=0.0005"), ("preference model",)),
    (("--config.mesh.offload=frozen", "--config.lora.rank=0", "--config.lora.base=float32"), ()),
    (("--config.reward.source=callable", "--config.reward.callable=own.py:score"), ()),
    (("--config.reward.source=preference+callable", "--config.reward.callable=own.py:score"), ()),
])
def test_the_models_that_run_in_the_scoring_program_beside_its_own(flags, fused):
    assert found(*flags)["ppo score"].fused == fused


@pytest.mark.parametrize(("source", "rewarded"), [("callable", False), ("preference+callable", True)])
def test_a_preference_model_is_resident_if_it_is_part_of_the_reward(source, rewarded):
    made = found(f"--config.reward.source={source}", "--config.reward.callable=own.py:score")
    assert ("ppo reward" in made) == rewarded == ("preference model" in made["ppo update"].stays)


JUDGED = ("--config.feedback.judge=model", "--config.judge.path=Llama-3.1-70B", "--config.judge.max_length=2048",
          "--config.judge.weights=int8", "--config.revise.batch=16", "--config.compare.batch=16", "--config.evaluate.batch=16",
          "--config.evaluate.win_rate_prompts=128")


def test_a_judge_of_another_folder_reads_and_writes_in_the_stages_that_ask_it():
    made = found("--config.stages=revise,sft,compare,preference,ppo,evaluate", "--config.data.source=prompts_jsonl",
                 "--config.data.red_team=x.jsonl", *JUDGED)
    write = made["revise generate (judge)"]  # A critique and a revision in each of 4 rounds for each of 768 prompts.
    assert write.rows == BatchShape(16, 2048 - 60, 60) and write.calls == 768 * 8 / 16
    assert set(write.stays) == {"policy", "judge"}
    label = made["compare score (judge)"]  # Both orders of 1,536 pairs, 4 principles; no reasoning.
    assert label.rows == BatchShape(16, 2048) and label.calls == 2 * 1536 * 4 / 16 and "compare generate (judge)" not in made
    assert made["evaluate score (judge)"].stays == ("judge",)  # The models that answered are freed before.
    assert not any("judge" in task.stays for name, task in made.items() if name.startswith(("sft", "preference", "ppo")))


def test_the_calls_of_all_rounds_are_counted():
    """Three rounds of ppo, and evaluation of two more models: base, sft, ppo and the last policy of rounds 2 and 3."""
    stages = "--config.stages=sft,ppo,evaluate", "--config.reward.source=ai_feedback"
    one, three = found(*stages), found(*stages, "--config.rounds=3")
    assert three["ppo update"].calls == 3 * one["ppo update"].calls and three["sft update"] == one["sft update"]
    assert three["evaluate generate"].calls * 3 == one["evaluate generate"].calls * 5
