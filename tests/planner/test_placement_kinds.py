"""Placements of stage ppo on machines of unlike kinds, by time and by cost."""

from __future__ import annotations

import contextlib
import functools
import io
import json

import pytest

from jaxalign import train
from jaxalign.errors import UserError
from jaxalign.plan import main, read_config
from jaxalign.planner.estimate import abstract_sharding
from jaxalign.planner.hardware import gpu_cluster
from jaxalign.planner.placement_kinds import kind_choices
from jaxalign.planner.prices import DevicePrices
from jaxalign.planner.search import Given
from jaxalign.planner.shapes import policy_model

LLAMA = ("--config=configs/real_size.py:llama31_8b_h100x8", "--config.model.path=unread", "--config.data.train=unread",
         "--config.stages=ppo", "--config.reward.source=callable", "--config.reward.callable=mine.py:score", "--prompt=512",
         "--shape=Llama-3.1-8B", "--gpus=H100x4,A100-80x8", "--search")
HOURLY = {"H100-80": 4.0, "A100-80": 1.0}


@pytest.fixture(scope="module")
def prices(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("prices") / "prices.json"
    file.write_text(json.dumps({"date": "2026-01-01", "currency": "USD", "per_device_hour": HOURLY}))
    return f"--prices={file}"


@functools.cache
def planned(*arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        main(["plan", *LLAMA, *arguments])
    return output.getvalue()


@pytest.mark.medium
def test_the_list_has_the_fastest_the_cheapest_and_one_that_a_program_can_run(prices):
    listed = json.loads(planned(prices, "--json"))["kinds"]["listed"]
    assert any(one["one_program"] for one in listed) and any(not one["one_program"] for one in listed)
    assert listed[0]["seconds"] <= 1.01 * min(one["seconds"] for one in listed)
    for one in listed:
        chips = {group["chip"] for group in one["groups"]}
        assert one["one_program"] == (len(one["machines"]) == 1) == (len(chips) == 1) == (one["flags"] is not None)
        ends = [[int(end) for end in group["devices"].split("-")] for group in one["groups"]]
        counts = [(group["chip"], own[-1] - own[0] + 1) for group, own in zip(one["groups"], ends, strict=True)]
        # Sets on different devices: the price is that of the devices in use.
        if one["schedule"] in ("flat", "synchronous", "separate"):
            hourly = sum(HOURLY[chip] * count for chip, count in counts)
            assert one["cost"] == pytest.approx(one["seconds"] / 3600 * hourly)
        for group in one["groups"]:
            assert group["peak_bytes"] <= group["usable_bytes"] == gpu_cluster(f"{group['chip']}x4").usable


def test_the_text_says_what_one_program_cannot_run(prices):
    text, listed = planned(prices), json.loads(planned(prices, "--json"))["kinds"]["listed"]
    several = sum(not one["one_program"] for one in listed)
    assert text.count("It needs several worlds, one on each of H100-80x4 and A100-80x8") == several
    assert text.count("cannot be run by one program") == several
    cheapest = min(range(len(listed)), key=lambda n: listed[n]["cost"])
    assert f"Cheapest: {cheapest + 1}." in text and "Fastest: 1." in text
    for one in listed:
        assert all(flag in text for flag in one["flags"] or ())


def test_the_written_config_is_one_that_a_program_can_run(prices, tmp_path, capsys):
    file = tmp_path / "placed.py"
    assert main(["plan", *LLAMA, prices, f"--write-config={file}", "--json"]) == 1  # Four H100 do not hold the run as one set.
    listed = json.loads(capsys.readouterr().out)["kinds"]["listed"]
    first = next(one for one in listed if one["one_program"])
    same, _, _ = train.read_arguments(["train", *LLAMA[:6], *first["flags"]])
    config, _, _ = train.read_arguments(["train", f"--config={file}"])
    assert config == same


def test_a_kind_without_a_price_is_refused():
    config = read_config(["plan", *LLAMA[:6]], "Llama-3.1-8B")
    policy = policy_model(config, abstract_sharding(config.mesh), "Llama-3.1-8B")
    given = Given(config, policy, gpu_cluster("H100x4"), prompt=512, others=(gpu_cluster("A100-80x4"),))
    with pytest.raises(UserError, match="have none for A100-80; add it to per_device_hour"):
        kind_choices(given, DevicePrices("2026-01-01", "USD", {"H100-80": 4.0}, ""))


def test_without_ppo_there_is_nothing_to_compare():
    config = read_config(["plan", "--config=configs/dpo.py"], "")
    policy = policy_model(config, abstract_sharding(config.mesh))
    assert kind_choices(Given(config, policy, gpu_cluster("L4x4"), others=(gpu_cluster("H100x4"),))) is None
