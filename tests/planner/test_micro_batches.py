"""The size of micro-batches that the planner chooses: micro_batch_tokens=auto."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxalign import plan
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.planner.hardware import topology_cluster
from jaxalign.planner.micro_batches import AutoChoices, choices, resolved, with_defaults, with_kept
from jaxalign.planner.topology import parse_topology
from jaxalign.steps.packed import part_rows
from jaxalign.train import read_values
from tests.planner.planned import config, given

AUTO = ("--config.ppo.micro_batch_tokens=auto", "--config.preference.micro_batch_tokens=auto")
LARGE = ("--config.mesh.fsdp=4", "--config.mesh.tensor=4", "--config.ppo.batch=256", "--config.preference.batch=64")
ONLINE = ("--config.stages=dpo,online_dpo", "--config.dpo.micro_batch_tokens=auto", "--config.dpo.max_length=768",
          "--config.online_dpo.max_new_tokens=256", "--config.dpo.batch=64", "--config.data.source=preferences_jsonl")


def small(memory: float):
    """The 8B run on 16 TPU chips, each with so many bytes."""
    made = given("v5e:4x4", *LARGE, prompt=512)
    return dataclasses.replace(made, cluster=dataclasses.replace(made.cluster, usable=memory))


def sizes(memory: float, stage: str = "ppo"):
    made = small(memory)
    return choices(made.config, stage, made.policy, lambda changed, only: made.estimated(changed, {only}))


@pytest.mark.parametrize("stage", ["preference", "ppo"])
def test_the_choice_is_the_fastest_size_that_fits_or_the_smallest(stage):
    every = sizes(1e12, stage)
    assert len(every) > 2 and all(one.tokens % 768 == 0 for one in every) and every[-1].tokens == 768
    for share in (0.95, 1.0):  # Memory that leaves 5% free, and memory that is just enough.
        for one in every:
            best = sizes(one.peak / share, stage)[0]
            fitting = [other for other in every if other.peak <= 0.95 * one.peak / share] or [
                other for other in every if other.peak <= one.peak / share]
            assert best.seconds <= 1.01 * min(other.seconds for other in fitting) and best.peak in [x.peak for x in fitting]
    assert sizes(1.0, stage)[0] == dataclasses.replace(every[-1], usable=1.0)
    # Fewer gathers of the weights for the same rows.
    assert every[0].seconds < every[-1].seconds and every[0].parts < every[-1].parts


@pytest.mark.parametrize("share", [0.95, 0.99, 1.0])
def test_a_choice_is_followed_by_smaller_and_slower_sizes(share):
    for one in sizes(1e12):
        listed = sizes(one.peak / share)
        assert [x.tokens for x in listed] == sorted((x.tokens for x in listed), reverse=True) and listed[-1].tokens == 768
        assert [x.seconds for x in listed] == sorted(x.seconds for x in listed)


def test_scoring_counts_as_often_if_the_number_of_rows_is_unknown():
    """A run never knows it before it has read the data."""
    flags = ("--config.stages=dpo", "--config.dpo.batch=64", "--config.dpo.max_length=768", "--config.mesh.fsdp=16")
    ratios = []
    for examples in (None, 6400):
        made = given("v5e:4x4", *flags, prompt=512, examples=examples)
        found = choices(made.config, "dpo", made.policy, lambda changed, only, made=made: made.estimated(changed, {only}))
        ratios.append(found[-1].seconds / found[0].seconds)
    assert ratios[0] == pytest.approx(ratios[1], rel=0.1)


def test_the_estimate_has_the_numbers_and_other_sections_keep_theirs():
    made = given("v5e:4x4", *LARGE, *AUTO, prompt=512)
    run, chosen = made.estimate(), {one.section: one for one in made.resolved()[1].sizes}
    for name in ("ppo", "preference"):
        assert getattr(run.config, name).micro_batch_tokens == chosen[name].tokens
    assert run == dataclasses.replace(made, config=run.config).estimate()
    assert run.fits and run.config.ppo.micro_batch_tokens > 0
    fixed = given("v5e:4x4", AUTO[0], prompt=512)
    assert fixed.estimate().config.preference.micro_batch_tokens == 1536  # As the test's config sets it.
    assert [one.section for one in fixed.resolved()[1].sizes] == ["ppo"]


def test_stages_that_share_a_section_have_the_smaller_size():
    made = given("v5e:4x4", *ONLINE, prompt=512)
    defaults = with_defaults(made.config)

    def estimate(changed, stage):
        return made.estimated(changed, {stage})

    found, ((choice,), _) = resolved(made.config, made.policy, estimate)
    each = [choices(defaults, stage, made.policy, estimate)[0].tokens for stage in ("dpo", "online_dpo")]
    assert found.dpo.micro_batch_tokens == choice.tokens == min(each)


def test_without_auto_nothing_is_estimated():
    made = given("v5e:4x4")
    assert resolved(made.config, made.policy, None) == (made.config, AutoChoices())


def test_the_plan_prints_the_choices_and_its_figures_have_them(capsys):
    flags = ["--config=configs/real_size.py:llama31_8b_h100x8", "--shape=Llama-3.1-8B", "--topology=h100:1x8", "--prompt=512"]
    assert plan.main(["plan", *flags, *AUTO]) == 0
    text = capsys.readouterr().out
    assert plan.main(["plan", *flags, *AUTO, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    for size in values["micro_batches"]:
        assert f"config.{size['section']}.micro_batch_tokens=auto: {size['tokens']} tokens per device" in text
    by_hand = [f"--config.{size['section']}.micro_batch_tokens={size['tokens']}" for size in values["micro_batches"]]
    assert plan.main(["plan", *flags, *by_hand, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == values["tasks"]


def test_a_stage_without_a_placement_is_resolved_beside_one_with_it(capsys):
    flags = ["--config=configs/real_size.py:llama31_8b_h100x8", "--shape=Llama-3.1-8B", "--topology=h100:1x8", "--prompt=512",
             "--config.placement.strategy=custom",
             "--config.placement.roles=policy+critic+reference+reward=0-7:fsdp=8,generator=0-7:tensor=8"]
    assert plan.main(["plan", *flags, AUTO[1], "--json"]) == 0
    assert [size["section"] for size in json.loads(capsys.readouterr().out)["micro_batches"]] == ["preference"]


@pytest.mark.medium
def test_a_written_config_has_the_numbers(tmp_path, capsys):
    flags = ["--config=configs/real_size.py:llama31_8b_v5e16", "--shape=Llama-3.1-8B", "--topology=v5e:4x4", "--prompt=512"]
    assert plan.main(["plan", *flags, *AUTO, "--search", f"--write-config={tmp_path / 'made.py'}", "--json"]) == 0
    chosen = {size["section"]: size["tokens"] for size in json.loads(capsys.readouterr().out)["micro_batches"]}
    values, _, _ = read_values(["plan", f"--config={tmp_path / 'made.py'}"])
    assert {name: values[name].micro_batch_tokens for name in chosen} == chosen and min(chosen.values()) > 0


def test_a_search_chooses_a_size_for_each_mesh(capsys):
    flags = ["--config=configs/real_size.py:llama31_8b_v5e16", "--shape=Llama-3.1-8B", "--topology=v5e:4x4", "--prompt=512"]
    assert plan.main(["plan", *flags, *AUTO, "--search", "--json"]) == 0
    assert {size["section"] for size in json.loads(capsys.readouterr().out)["micro_batches"]} == {"preference", "ppo"}


@pytest.mark.parametrize(("flags", "message"), [
    (["--config.ppo.micro_batch_tokens=Auto"],
     "config.ppo.micro_batch_tokens is 'Auto'; it must be at least 0, or 'auto'"),
    (["--config.ppo.micro_batch_tokens=1.5"], r"config.ppo.micro_batch_tokens is 1.5 \(float\); an int or str is expected"),
    ([AUTO[0], "--config.placement.strategy=separate"],
     "config.placement.strategy is 'separate', and config.ppo.micro_batch_tokens is 'auto', which is chosen for one mesh"),
])
def test_bad_values_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        config(*flags)


def test_an_objective_that_sorts_the_batch_has_no_micro_batches():
    values = {"stages": ("pretrain", "compare", "dpo"), "dpo": {"objective": "aot", "micro_batch_tokens": "auto"}}
    with pytest.raises(UserError, match="config.dpo.micro_batch_tokens is 'auto'; objective 'aot' sorts the whole batch"):
        from_config_dict(values)


def test_the_host_refuses_auto_where_nothing_resolves_it():
    with pytest.raises(UserError, match="micro_batch_tokens is 'auto', which a run of stages or a plan replaces; give"):
        part_rows(8, 64, "auto")


def kept(topology: str, *flags: str):
    """The choice for a mesh of the 8B, all of whose weights are trained."""
    all_weights = ("--config.lora.rank=0", "--config.lora.base=float32")
    made = given("v5e:4x4", *all_weights, "--config.mesh.keep_gathered=auto", *flags, prompt=512)
    made = dataclasses.replace(made, cluster=topology_cluster(parse_topology(topology)))
    return made, made.resolved()[1].kept


def test_weights_stay_gathered_where_the_network_limits_updates():
    made, choice = kept("h100:2x8", "--config.mesh.fsdp=16", "--config.mesh.tensor=1")
    assert choice.keep
    run, without = made.estimate(), dataclasses.replace(made, config=with_kept(made.config, "never")).estimate()
    assert run.config.mesh.keep_gathered == "always" and run.fits
    updates = [[task for task in each.tasks if task.task.phase == "update"] for each in (run, without)]
    for one, other in zip(*updates, strict=True):
        assert one.network < 0.75 * other.network and one.compute == other.compute
        # By hand: the weights of the 8B in bfloat16, but for the norms, which no axis splits.
        assert one.work.early == pytest.approx(2 * 8.03e9 * 15 / 16 * len(one.task.runs) * one.task.steps, rel=0.07)


@pytest.mark.parametrize(("topology", "flags", "reason"), [
    ("h100:1x8", ("--config.mesh.fsdp=8", "--config.mesh.tensor=1", "--config.ppo.micro_batch_tokens=auto",
                  "--config.preference.micro_batch_tokens=auto"), "times as long with always, if communication overlaps with"),
    ("v5e:4x4", ("--config.mesh.fsdp=16", "--config.mesh.tensor=1"), "would need"),
])
def test_weights_do_not_stay_gathered_where_that_is_slower_or_does_not_fit(topology, flags, reason):
    made, choice = kept(topology, *flags)
    assert not choice.keep and reason in choice.reason
    assert made.estimate().config.mesh.keep_gathered == "never"


@pytest.mark.medium
def test_the_plan_prints_and_writes_the_choice_for_gathered_weights(tmp_path, capsys):
    flags = ["--config=configs/real_size.py:llama31_8b_h100x8", "--shape=Llama-3.1-8B", "--topology=h100:2x8", "--prompt=512",
             "--config.mesh.keep_gathered=auto"]
    path = tmp_path / "written.py"
    assert plan.main(["plan", *flags, "--config.mesh.fsdp=16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keep_gathered"]["keep"] is True
    assert plan.main(["plan", *flags, "--search", f"--write-config={path}"]) == 0
    text = capsys.readouterr().out
    written = read_values(["plan", f"--config={path}"])[0].mesh
    if written.fsdp > 1:
        assert f"config.mesh.keep_gathered=auto: {written.keep_gathered}. " in text
    else:  # The search also tries meshes without fsdp, on which nothing is gathered.
        assert written.keep_gathered == "never"
