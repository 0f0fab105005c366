"""The decision whether decoding copies the layers out of their stacks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxalign.config import Mesh
from jaxalign.models import model as model_module
from jaxalign.models import unstacked
from jaxalign.models.adapters import quantised
from jaxalign.models.adapters.lora import LoraAdapters, join
from jaxalign.parallel.sharding import Sharding, make_sharding
from jaxalign.rollout import ring
from tests import tiny
from tests.adapters import adapted

LAYER = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24
"""Kernel numbers of a layer of tiny.DECODER, which has two layers, and two norms of 16 numbers in each."""
GIB = 1 << 30


def on_a_gpu(monkeypatch, memory: int | None, share: float) -> None:
    """Makes every mesh appear to be of GPUs with this memory. share: the largest share for the copy."""
    monkeypatch.setattr(Sharding, "platform", "gpu")
    monkeypatch.setattr(unstacked, "usable_memory", lambda devices: memory)
    monkeypatch.setattr(unstacked, "SHARE", share)


@pytest.mark.parametrize(("mesh", "numbers"), [(None, 2 * (LAYER + 32)), ((2, 2, 2), 2 * (LAYER / 2 + 32))])
def test_bytes_of_the_layers_on_a_device(mesh, numbers):
    """Sampling splits the kernels over tensor only, and no norms."""
    model, params = tiny.model(mesh).generation, tiny.host_params()
    assert unstacked.layer_bytes(model, params) == pytest.approx(4 * numbers)
    halves = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    assert unstacked.layer_bytes(model, halves) == pytest.approx(2 * numbers)


@pytest.mark.cpu
def test_a_cpu_copies_unrolled_layers_and_no_others(monkeypatch):
    params = tiny.host_params()
    assert unstacked.unstacks(tiny.model(), params) and not unstacked.unstacks(tiny.model(layers=17), params)
    monkeypatch.setattr(model_module, "LAYERED", {})
    assert not unstacked.unstacks(tiny.model(), params)
    assert ring.decoding_options(tiny.model(), params) is None


@pytest.mark.parametrize(("memory", "extra", "copies"), [(GIB, 0, True), (2 * GIB - 1, -1, False), (None, 0, False)])
def test_a_gpu_copies_unrolled_layers_if_a_share_of_its_memory_in_gib_suffices(monkeypatch, memory, extra, copies):
    model, params = tiny.model(), tiny.host_params()
    on_a_gpu(monkeypatch, memory, (4 * 2 * (LAYER + 32) + extra) / GIB)
    assert unstacked.unstacks(model, params) == copies
    assert ring.decoding_options(model, params) is (ring.GPU_OPTIONS if copies else ring.IN_PLACE)


def test_quantised_or_scanned_layers_keep_the_kernels_that_convert_them(monkeypatch):
    on_a_gpu(monkeypatch, None, 0.25)
    params = tiny.host_params()
    whole = quantised.quantise(params, "int8")
    assert unstacked.has_quantised_layers(whole) and not unstacked.has_quantised_layers(params)
    assert ring.decoding_options(tiny.model(), whole) is ring.GPU_OPTIONS
    monkeypatch.setattr(model_module, "LAYERED", {})
    assert ring.decoding_options(tiny.model(), params) is ring.GPU_OPTIONS


@pytest.mark.parametrize(("mesh", "rules", "copied"), [
    ({"fsdp": 4}, "tensor", True), ({"fsdp": 4}, "training", False), ({"pipeline": 2}, "training", False),
    ({"tensor": 2}, "training", True),
])
def test_layers_that_sampling_gathers_are_not_copied(mesh, rules, copied):
    sharding = make_sharding(Mesh(**mesh, generation=rules))
    assert unstacked.copied_on_gpus(sharding.generation, 1.0, GIB) == copied


@pytest.mark.parametrize(("kind", "kernel_bytes"), [("int8", LAYER), ("nf4", LAYER / 2)])
def test_adapters_and_quantised_kernels_count(kind, kernel_bytes):
    """The kernels are at least as large as their numbers; scales are added."""
    model, params = adapted(LoraAdapters(rank=3, alpha=5.0, targets=("*",)))
    own = sum(leaf.size * 4 for leaf in jax.tree.leaves(params["adapters"]))
    base = quantised.quantise(tiny.host_params(), kind)
    without = unstacked.layer_bytes(model, base)
    assert 2 * (kernel_bytes + 2 * 16 * 4) <= without < 4 * 2 * (LAYER + 32)
    assert unstacked.layer_bytes(model, join(base, {"adapters": params["adapters"]})) == pytest.approx(without + own)
