"""The placements of stage ppo that a plan lists, and the config file that it writes."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math

import pytest

from jaxalign import train
from jaxalign.config import from_config_dict
from jaxalign.placement.custom import parse_entry
from jaxalign.placement.machine import Host, Machine
from jaxalign.placement.meshes import AXES, Limits
from jaxalign.placement.resolve import resolve
from jaxalign.plan import main, read_config
from jaxalign.planner.estimate import abstract_sharding
from jaxalign.planner.hardware import gpu_cluster
from jaxalign.planner.placement_choices import joined, placement_choices
from jaxalign.planner.search import Given
from jaxalign.planner.shapes import policy_model

LLAMA = ("--config=configs/real_size.py:llama31_8b_h100x8", "--config.model.path=unread", "--config.data.train=unread")
ON_H100 = (*LLAMA, "--shape=Llama-3.1-8B", "--prompt=512", "--gpus=H100x8")
ALONE = ("--config.stages=ppo", "--config.reward.source=callable", "--config.reward.callable=mine.py:score")
SMALL = ("--config=configs/ppo.py", "--gpus=L4x8", "--config.preference.members=1")
# config.json of Llama-3.1-8B; rows of an update of the policy and the critic, and of a batch.
SHAPE = {"heads": 32, "kv_heads": 8, "mlp": 14336, "embed": 4096, "layers": 32, "vocab": 128256}
ROWS = {"policy": 32, "critic": 32, "reference": 64, "reward": 64}
PHASES = ("generation", "scoring", "training")


@functools.cache
def planned(*arguments: str) -> str:
    """What a plan with --search prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        main(["plan", *arguments, "--search"])
    return output.getvalue()


def choices(*arguments: str):
    """The placements of a plan, without its other parts. arguments: those of the config, then --gpus and --shape."""
    *own, gpus, shape = arguments
    config = read_config(["plan", *own], shape)
    policy = policy_model(config, abstract_sharding(config.mesh), shape or None)
    return placement_choices(Given(config, policy, gpu_cluster(gpus), prompt=512 if shape else None))


def placements(*arguments: str) -> dict:
    return json.loads(planned(*arguments, "--json"))["placements"]


def section(*arguments: str) -> list[str]:
    """The lines of the section."""
    lines = planned(*arguments).splitlines()
    return lines[next(n for n, line in enumerate(lines) if line.startswith("Placements of stage ppo")):]


def test_at_most_four_placements_are_listed_with_all_roles_and_one_of_them_keeps_the_roles_together():
    best = placements(*ON_H100)["best"]
    assert 2 <= len(best) <= 4 and sum(one["schedule"] == "flat" for one in best) == 1
    for one in best:
        roles = [role for entry in one["roles"] for role in parse_entry(entry).roles]
        assert set(ROWS) <= set(roles) and one["schedule"] in ("flat", "synchronous", "interleave", "separate")
        assert one["seconds"] == pytest.approx(sum(one["phases"].values()) + one["moved_seconds"])
        assert one["peak_bytes"] <= gpu_cluster("H100x8").usable and 0 <= one["idle"] < 1
        # Equal within 1%, the placement with fewer sets comes first.
        assert one["seconds"] >= best[0]["seconds"] / 1.01


def test_the_text_has_the_figures_of_the_json():
    lines, best = section(*ON_H100), placements(*ON_H100)["best"]
    assert lines[0] == ("Placements of stage ppo: an iteration of 64 responses, 512 prompt tokens and 256 new tokens each, on "
                        "H100-80x8")
    assert lines[1].split() == ["schedule", *PHASES, "moves", "seconds", "idle", "peak", "GB"]
    for line, one in zip(lines[3:], best, strict=False):
        numbers = [*(one["phases"][phase] for phase in PHASES), one["moved_seconds"], one["seconds"]]
        assert line.split()[2:] == [*(f"{number:.3g}" for number in numbers), f"{one['idle']:.0%}",
                                    f"{one['peak_bytes'] / 1e9:.1f}"]
        assert all(any(reason in other for other in lines) for reason in one["reasons"])
        assert all(any(flag in other for other in lines) for flag in one["flags"])


def test_the_flags_are_accepted_by_the_config_and_by_the_resolver():
    machine = Machine((Host("H100", 8),))
    limits = {role: Limits(rows=rows, **SHAPE) for role, rows in ROWS.items()}
    for one in placements(*ON_H100)["best"]:
        config = from_config_dict(train.read_values(["train", *LLAMA, *one["flags"]])[0])
        own, mesh = config.placement, {axis: getattr(config.mesh, axis) for axis in AXES}
        placed = resolve(own.strategy, tuple(ROWS), machine, mesh, custom=own.roles, limits=limits).roles
        for entry in map(parse_entry, one["roles"]):
            for role in entry.roles:
                assert (placed[role].devices, placed[role].mesh) == (entry.devices, entry.mesh)


def test_all_roles_together_take_about_as_long_and_as_much_memory_as_in_the_plan_of_the_same_run():
    # A role's time adds the latency of collectives, which the plan leaves out; the plan scores with all roles in one program.
    (one,) = (one for one in placements(*ON_H100)["best"] if one["schedule"] == "flat")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["plan", *ON_H100, *one["flags"], "--json"]) == 0
    tasks = [task for task in json.loads(output.getvalue())["tasks"] if task["stage"] == "ppo"]
    # 200 iterations.
    assert sum(task["seconds"] * task["calls"] for task in tasks) / 200 == pytest.approx(one["seconds"], rel=0.1)
    assert max(task["peak_bytes"] for task in tasks) == pytest.approx(one["peak_bytes"], rel=0.05)


def test_placements_fit_into_the_memory_that_the_plan_counts():
    """With all 80 GB of a device, a placement of 79.2 GB was listed."""
    arguments = (*LLAMA, "--shape=gemma-2-9b", "--prompt=512", "--gpus=H100x8", "--config.ppo.batch=592")
    assert all(one["peak_bytes"] <= gpu_cluster("H100x8").usable for one in placements(*arguments)["best"])


def test_the_text_has_one_limit_of_the_memory():
    text = planned(*ON_H100)
    assert "78.3 GB usable on each device" in text and "of 78.3 GB on a device" in text and "80.0" not in text


def test_a_device_is_idle_while_only_other_sets_work():
    """The mean over the devices, with one device after the other."""
    for choice in choices(*LLAMA, "H100x8", "Llama-3.1-8B").best:
        found, busy = choice.found, [0.0] * 8
        for group, devices in zip(found.sets, found.slices, strict=True):
            for device in range(devices.start, devices.stop):
                busy[device] += sum(one.variants[phase].seconds for one in group.members for phase in one.variants)
        idle = [1 - (seconds + found.moved) / found.seconds for seconds in busy[:8 - found.unused]] + [1.0] * found.unused
        assert choice.idle == pytest.approx(sum(idle) / 8, abs=1e-9)


def test_grpo_has_no_critic():
    best = placements("--config=configs/grpo.py", "--gpus=L4x4")["best"]
    assert best and not any("critic" in entry or "value" in entry for one in best for entry in one["roles"])


def test_a_run_without_ppo_has_no_section():
    own = ("--config=configs/dpo.py", "--gpus=L4x8")
    assert "Placements" not in planned(*own) and placements(*own) is None


@pytest.mark.parametrize(("arguments", "sentence"), [
    ((*LLAMA, "H100x8", "Llama-3.1-70B"), "no mesh of H100-80x8 with mesh.generation=tensor fits the stages other than ppo"),
    ((*LLAMA, *ALONE, "H100x8", "Llama-3.1-70B"), "no placement of policy, critic and reference fits on 8 H100-80"),
    ((*LLAMA, *ALONE, "--config.ppo.batch=8192", "H100x8", "Llama-3.1-8B"), "with all 8192 responses sampled at once"),
    ((*LLAMA, *ALONE, "H100x1", "Llama-3.1-8B"), "one device has only strategy flat"),
    (("--config=configs/ppo.py", "--config.mesh.offload=optimizer", "L4x8", ""), "which works with strategy flat only"),
    (("--config=configs/direct_rlaif.py", "L4x8", ""), "config.reward.source has ai_feedback"),
])
def test_a_run_without_placements_has_one_sentence(arguments, sentence):
    found = choices(*arguments)
    assert not found.best and sentence in found.refused and ". " not in found.refused


def test_several_hosts_print_one_sentence():
    own = (*LLAMA, "--shape=Llama-3.1-8B", "--gpus=H100x16")
    (line, *rest) = section(*own)
    assert line == f"Placements of stage ppo: {placements(*own)['refused']}." and not rest
    assert "2 hosts, each with a process of its own, and several processes run only strategy flat" in line


def test_the_written_config_is_that_of_the_fastest_placement(tmp_path, capsys):
    file = tmp_path / "placed.py"
    assert main(["plan", *SMALL, "--search", f"--write-config={file}", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["placements"]["best"][0]
    config, _, _ = train.read_arguments(["train", f"--config={file}"])
    same, _, _ = train.read_arguments(["train", SMALL[0], SMALL[2], *best["flags"]])
    assert config == same and config.preference.members == 1
    assert math.prod(getattr(config.mesh, axis) for axis in AXES) == 8
    assert train.main(["train", f"--config={file}", "--dry-run", f"--workdir={tmp_path / 'run'}"]) == 0
    assert main(["plan", *SMALL, "--search", f"--write-config={file}"]) == 2
    assert "the file exists; choose a new name" in capsys.readouterr().err


def test_a_config_is_written_only_by_a_search_and_only_if_a_mesh_fits(tmp_path, capsys, monkeypatch):
    file = tmp_path / "placed.py"
    monkeypatch.setattr("jaxalign.planner.search.advice", lambda given: [])  # It takes seconds.
    assert main(["plan", *SMALL, f"--write-config={file}"]) == 2
    assert "--write-config needs --search" in capsys.readouterr().err
    own = (*LLAMA, "--shape=Llama-3.1-70B", "--gpus=H100x8")
    assert main(["plan", *own, "--search", f"--write-config={file}"]) == 1
    assert "is not written, because no mesh fits" in capsys.readouterr().err and not file.exists()


def test_roles_of_equal_devices_and_meshes_share_an_entry():
    entries = ("policy=0-3:data=2,tensor=2", "reference=4-7:tensor=4", "critic=0-3:data=2,tensor=2", "reward=4-7:data=4")
    assert joined(entries) == ("policy+critic=0-3:data=2,tensor=2", "reference=4-7:tensor=4", "reward=4-7:data=4")
