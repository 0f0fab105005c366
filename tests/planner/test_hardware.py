"""Chips and clusters: the vendors' figures, tori with wrap-around links, valid and invalid names."""

from __future__ import annotations

import pytest
from planner.planned import cluster

from jaxalign.errors import UserError
from jaxalign.planner.hardware import chips, gpu_cluster


def test_every_chip_cites_the_source_of_its_figures():
    assert set(chips()) >= {"v4", "v5e", "v5p", "v6e", "A100-40", "A100-80", "H100-80", "H200", "L4", "RTX4090"}
    assert all(len(chip.source) > 40 and chip.memory > 1e10 and chip.hbm > 1e11 for chip in chips().values())


def test_published_figures():
    v5p, h100 = chips()["v5p"], chips()["H100-80"]
    assert (v5p.memory, v5p.bf16_flops, v5p.hbm, 6 * 2 * v5p.link) == (95 * 2**30, 459e12, 2765e9, 1200e9)
    assert (h100.memory, h100.bf16_flops, h100.hbm, 2 * h100.link) == (80e9, 989e12, 3350e9, 900e9)


@pytest.mark.parametrize(("topology", "closed"), [
    ("v5p:4x4x8", (True, True, True)), ("v5p:2x4x4", (False, False, False)), ("v4:2x2x1", (False, False, False)),
    ("v5e:16x16", (True, True)), ("v5e:8x16", (False, True)), ("v6e:8x8", (False, False)),
])
def test_a_torus_has_wrap_around_links_in_whole_cubes_or_at_sixteen(topology, closed):
    assert cluster(topology).closed == closed


def test_names_and_hosts():
    found = cluster("v5e:4x4", slices=2)
    assert (found.devices, found.hosts, found.name, found.far) == (32, 4, "v5e:4x4 x 2 slices", 25e9 / 8)
    assert gpu_cluster("h100x16").name == "H100-80x16" and gpu_cluster("H100x16").hosts == 2


@pytest.mark.parametrize(("text", "sentence"), [
    ("H100", r"'H100'; expected a name and a count, as in H100-80x8"),
    ("H100x0", "a name and a count"),
    ("A100x8", "did you mean A100-40 or A100-80"),
    ("H20x8", r"'H20' does not name exactly one of the known GPUs: .*did you mean H200"),
    ("RTX4090x16", "no network between hosts is known for it; plan at most 8"),
])
def test_invalid_gpu_names_are_refused(text, sentence):
    with pytest.raises(UserError, match=sentence):
        gpu_cluster(text)


def test_a_slice_larger_than_any_that_exists_is_refused():
    with pytest.raises(UserError, match="v5e:32x16 has 512 chips; the largest slice of v5e has 256: connect several"):
        cluster("v5e:32x16")
