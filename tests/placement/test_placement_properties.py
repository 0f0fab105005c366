"""Random machines, roles and strategies: a placement keeps every rule, or one sentence names a placement that does."""

from __future__ import annotations

import itertools
import math
import re

from hypothesis import event, given, settings
from hypothesis import strategies as st

from jaxalign.errors import UserError
from jaxalign.placement.machine import Host, Machine
from jaxalign.placement.meshes import AXES, Limits
from jaxalign.placement.plan import Placement
from jaxalign.placement.resolve import resolve
from jaxalign.placement.roles import independent

HOSTS = st.builds(Host, st.sampled_from(["TPU v5p", "TPU v5p", "TPU v5e"]), st.sampled_from([1, 2, 3, 4, 4, 8]))
UNLIKE = st.lists(HOSTS, min_size=1, max_size=8).map(lambda hosts: Machine(tuple(hosts)))
ALIKE = st.builds(lambda host, count, processes: Machine((host,) * count, processes=count if processes else 1), HOSTS,
                  st.integers(1, 8), st.booleans())
MACHINES = UNLIKE | ALIKE
ROLES = st.sets(st.sampled_from(["critic", "reference", "reward", "reward.a", "reward.b", "judge"])).map(
    lambda others: ("policy", *sorted(others)))
MESHES = st.fixed_dictionaries({}, optional={axis: st.sampled_from([1, 2, 3, 4, 8]) for axis in ("data", "fsdp", "tensor")})
SIZES = st.builds(Limits, *(st.sampled_from([0, 1, 3, 8, 12, 32]),) * 3)
LIMITS = st.dictionaries(st.sampled_from(["policy", "critic", "reward", "generator"]), SIZES, max_size=3)


def check(placement: Placement, roles: tuple[str, ...], machine: Machine, limits: dict[str, Limits]) -> None:
    """The rules, on sets of devices."""
    host_of = [index for index, host in enumerate(machine.hosts) for _ in range(host.devices)]
    assert set(roles) <= set(placement.roles) <= {*roles, "generator", "value"}
    owned = {}
    for name, placed in placement.roles.items():
        devices = owned[name] = set(range(placed.devices.start, placed.devices.stop))
        hosts = {host_of[device] for device in devices}
        assert len({machine.hosts[host].kind for host in hosts}) == 1
        assert len(hosts) == 1 or devices == {device for device, host in enumerate(host_of) if host in hosts}
        assert tuple(placed.mesh) == AXES and math.prod(placed.mesh.values()) == len(devices)
        own = {"generator": "policy", "value": "critic"}.get(name, name.split(".")[0])
        size = limits.get(name) or limits.get(own) or Limits()
        assert size.heads % placed.mesh["tensor"] == size.kv_heads % placed.mesh["tensor"] == 0
        assert size.rows % (placed.mesh["data"] * placed.mesh["fsdp"]) == 0
        assert machine.processes == 1 or len(devices) == machine.count
    for (first, a), (second, b) in itertools.combinations(owned.items(), 2):
        assert a == b or not a & b or ((a < b or b < a) and not independent(first, second))
    assert sorted(name for names in placement.groups.values() for name in names) == sorted(placement.roles)
    assert all(owned[name] == owned[names[0]] for names in placement.groups.values() for name in names)


def check_strategy(placement: Placement, machine: Machine) -> None:
    """What each strategy promises."""
    devices = {name: placed.devices for name, placed in placement.roles.items()}
    if placement.strategy == "flat":
        assert len(placement.groups) == 1 and not {"generator", "value"} & set(devices)
    elif placement.strategy == "interleave":
        parts = sorted({part for name, part in devices.items() if name not in ("policy", "critic")}, key=lambda x: x.start)
        assert len(parts) >= 2 and parts[0].start == 0 and parts[-1].stop == devices["policy"].stop
        assert all(a.stop == b.start for a, b in itertools.pairwise(parts))  # contiguous, disjoint and covering
        assert devices.get("critic", devices["policy"]) == devices["policy"]
    elif placement.strategy == "separate":
        assert len(placement.groups) == 2 and devices["policy"].stop == devices["generator"].start
        assert devices["policy"].start == 0 and devices["generator"].stop == machine.count
        assert ("value" in devices) == ("critic" in devices)
        mesh = placement.roles["generator"].mesh
        assert mesh["fsdp"] == mesh["context"] == mesh["pipeline"] == 1


def one_sentence(error: UserError) -> str:
    text = str(error)
    assert "\n" not in text and not re.search(r"[.?!] ", text) and not text.endswith(".")
    return text


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["flat", "interleave", "separate"]), ROLES, MACHINES, MESHES, st.sampled_from([0, 0, 1, 2, 4, 9]),
       LIMITS)
def test_strategies(strategy, roles, machine, mesh, generation_devices, limits):
    options = {"generation_devices": generation_devices if strategy == "separate" else 0, "limits": limits}
    # Follow the advice of each error; every one removes one obstacle.
    for _ in range(5):
        try:
            placement = resolve(strategy, roles, machine, mesh, **options)
        except UserError as error:
            text = one_sentence(error)
        else:
            event(f"{strategy} works")
            check(placement, roles, machine, limits)
            check_strategy(placement, machine)
            return
        advice = re.search(r"; (?:use the mesh )?((?:\w+=\d+,?)+)(?: on devices 0(?:-\d+)?)?(?: would work| or flat)$", text)
        if advice and not (strategy == "separate" and " on devices " in text):
            mesh = {axis: int(size) for axis, size in (part.split("=") for part in advice[1].split(","))}
        elif number := re.search(r"; (\d+) would work$", text):
            options["generation_devices"] = int(number[1])
        elif text.endswith("use flat"):
            strategy, options["generation_devices"] = "flat", 0
        else:
            event("no advice for this strategy")
            assert "no mesh of" in text or strategy == "separate"
            return
    raise AssertionError(f"the advice does not lead to a placement: {text}")


@st.composite
def entries(draw) -> dict[str, str]:
    """Devices and meshes by role, on up to 16 devices."""
    entries = {}
    for name in ("policy", *sorted(draw(st.sets(st.sampled_from(["reference", "reward", "generator"]))))):
        start, count = draw(st.integers(0, 12)), draw(st.sampled_from([1, 2, 4, 8]))
        mesh = draw(st.sampled_from(["", "", f":tensor={count}", ":data=2,tensor=2"]))
        entries[name] = f"{start}-{start + count - 1}{mesh}"
    return entries


@settings(max_examples=150, deadline=None)
@given(entries(), MACHINES, LIMITS)
def test_custom(entries, machine, limits):
    machine, roles = Machine(machine.hosts), tuple(name for name in entries if name != "generator")
    for _ in range(4 * len(entries)):
        try:
            placement = resolve("custom", roles, machine, {}, custom=[f"{a}={b}" for a, b in entries.items()], limits=limits)
        except UserError as error:
            text = one_sentence(error)
        else:
            event("works")
            return check(placement, roles, machine, limits)
        if devices := re.match(r"devices \S+ of (\w+) (?:split|are of|do not).*; devices (\S+) would work$", text):
            entries[devices[1]] = devices[2]
        elif text.startswith("the mesh "):
            advice = re.search(r"(?:but|for|of) (\w+)(?: has .*|, which .*)?; (\S+)(?: on devices (\S+))? would work$", text)
            role, mesh, part = advice.groups()
            entries[role] = f"{part or entries[role].split(':')[0]}:{mesh}"
        else:
            apart = re.search(r"; (\w+)=(\S+) would work$", text)
            entries[apart[1]] = apart[2]
    raise AssertionError(f"the advice does not lead to a placement: {text}")
