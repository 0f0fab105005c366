"""FLOPs of a model, against counts by hand."""

from __future__ import annotations

import dataclasses

from jaxalign.models import flops
from jaxalign.models.adapters.lora import LoraAdapters
from jaxalign.models.architecture import DecoderConfig, Experts
from jaxalign.models.model import Model

CONFIG = DecoderConfig(vocab=50, layers=3, embed=8, heads=4, kv_heads=2, head_dim=6, mlp=20, tie_embeddings=False)
ATTENTION = 8 * 24 + 2 * 8 * 12 + 24 * 8  # query; key and value; out
KERNELS = 3 * (ATTENTION + 3 * 8 * 20)


def test_only_kernels_count_for_a_token():
    assert flops.multiplied(Model(CONFIG)) == flops.multiplied(Model(CONFIG, "scalar")) == KERNELS


def test_forward_counts_kernels_attention_and_heads():
    seen = (1 + 2 + 3 + 4 + 5) + (1 + 2)
    expected = 2 * KERNELS * 7 + 3 * 4 * 6 * (2 + 2) * seen + 2 * 8 * 50 * 4  # scores and weighted sums: two operations each
    assert flops.forward(Model(CONFIG), [5, 2], 4) == expected
    assert flops.learning(Model(CONFIG), [5, 2], 4) == 3 * expected


def test_frozen_kernels_have_no_gradient():
    plain, adapted = Model(CONFIG), Model(CONFIG, lora=LoraAdapters(2, 4.0, ("attention.query",)))
    own = 3 * (8 * 2 + 2 * 24)
    assert flops.multiplied(adapted) == KERNELS + own
    assert flops.learning(plain, [9], 3) - flops.learning(adapted, [9], 3) == 2 * (KERNELS * 9 + 8 * 50 * 3) - 6 * own * 9


def test_only_active_experts_count():
    found = flops.multiplied(Model(dataclasses.replace(CONFIG, experts=Experts(4, 2))))
    assert found == 3 * (ATTENTION + 2 * 3 * 8 * 20 + 8 * 4)
