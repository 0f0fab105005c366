"""Two tiers of rows: samples equal those of one ring, rows outgrow the short tier, and the layout changes in small steps."""

from __future__ import annotations

import collections
import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.warm_up import warm_up
from jaxalign.models import model as model_module
from jaxalign.rollout import layouts
from jaxalign.rollout.layouts import Layout, in_tiers, neighbours, row_counts, single, slot_counts, step_towards
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from jaxalign.rollout.session import Session
from tests import tiny
from tests.compilations import SEEN
from tests.rollout import simple

NEW, QUEUE, ROWS = 38, tiny.PROMPTS * 6, range(100, 148)
SAMPLING = Sampling(NEW, tiny.STOPS)


@pytest.fixture(scope="module")
def params():
    return tiny.place(tiny.model(), tiny.host_params(scale=1.5))


@pytest.fixture(scope="module")
def expected(params):
    return simple.respond(tiny.model(), params, QUEUE, jax.random.key(0), SAMPLING, ROWS)


@pytest.fixture
def small(monkeypatch) -> collections.Counter:
    """Allow tiers from 4 rows and 16 slots. Count the chunks by number of tiers, and the rows that changed tiers."""
    monkeypatch.setattr(layouts, "LEAST_TIERED", (4, 16))
    seen = collections.Counter()
    chunk, exchange = Session.chunk, Session.exchange

    def counted_chunk(self):
        seen[f"{len(self.layout.rows)} tiers"] += 1
        return chunk(self)

    def counted_exchange(self, plan):
        seen["rows"] += int((plan[..., 0] >= 0).sum())
        exchange(self, plan)

    monkeypatch.setattr(Session, "chunk", counted_chunk)
    monkeypatch.setattr(Session, "exchange", counted_exchange)
    return seen


def test_the_expected_responses_need_both_tiers(expected):
    """The short tier holds 22 tokens: many responses are shorter and several longer."""
    lengths = [len(prompt) + len(ids) for prompt, (ids, _) in zip(QUEUE, expected, strict=True)]
    assert sum(length > 22 for length in lengths) > 8 and sum(length < 20 for length in lengths) > 20


@pytest.mark.medium
@pytest.mark.variants(1)
@pytest.mark.parametrize(("mesh", "batch"), [(None, 8), ((2, 1, 1), 8), ((1, 2, 2), 12)])
def test_samples_of_two_tiers_equal_the_definition(params, expected, small, mesh, batch):
    """Rows that outgrow the short tier continue in the long one; the last prompts share one tier of fewer rows."""
    model = tiny.model(mesh)
    placed = params if mesh is None else tiny.place(model, tiny.host_params(scale=1.5))
    found = tiny.respond(Engine(model, batch, 64, 8), placed, QUEUE, jax.random.key(0), SAMPLING, ROWS)
    assert [response.ids for response in found] == [ids for ids, _ in expected]
    np.testing.assert_allclose([r.logprob for r in found], [sum(logprobs) for _, logprobs in expected], atol=3e-4)
    assert small["2 tiers"] > 2 and small["1 tiers"] > 0 and small["rows"] > 1


def test_rows_of_equal_final_length_have_one_tier(params, small):
    endless = dataclasses.replace(SAMPLING, stop_ids=())
    found = tiny.respond(Engine(tiny.model(), 8, 64, 8), params, QUEUE, jax.random.key(0), endless, ROWS)
    assert {len(response.ids) for response in found} == {NEW}
    assert small["1 tiers"] > 0 == small["2 tiers"]


def test_a_prompt_too_long_for_the_short_tier(params, small):
    """All rows share one tier while it enters; the others are sampled as before."""
    long = [[1, 5] + [7, 9] * 12 if i == 20 else prompt for i, prompt in enumerate(QUEUE)]
    found = tiny.respond(Engine(tiny.model(), 8, 64, 8), params, long, jax.random.key(0), SAMPLING, ROWS)
    ((expected, _),) = simple.respond(tiny.model(), params, [long[20]], jax.random.key(0), SAMPLING, [ROWS[20]])
    assert found[20].ids == expected and small["2 tiers"] > 0 < small["1 tiers"]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "layered"), [
    ({"layers": 2, "window": 9, "local_layers": (True, False), "local_rope_base": 500.0}, False),
    ({"cache_dtype": "int8"}, True),
], ids=str)
def test_samples_of_two_tiers_equal_those_of_one_for_every_kind_of_cache(small, changes, layered, monkeypatch):
    if not layered:
        monkeypatch.setattr(model_module, "LAYERED", {})
        jax.clear_caches()
    model = tiny.model(**changes)
    params = jax.tree.map(lambda x: 1.5 * x, model.init(jax.random.key(0)))
    found = tiny.respond(Engine(model, 8, 64, 8), params, QUEUE, jax.random.key(0), SAMPLING, ROWS)
    assert small["2 tiers"] > 2 and small["rows"] > 2
    monkeypatch.setattr(layouts, "LEAST_TIERED", (99, 99))
    alone = tiny.respond(Engine(model, 8, 64, 8), params, QUEUE, jax.random.key(0), SAMPLING, ROWS)
    jax.clear_caches()  # Compiled programs are not keyed by the layout of layers.
    assert [response.ids for response in found] == [response.ids for response in alone]


@pytest.mark.slow
def test_another_queue_with_tiers_compiles_nothing(params, small):
    engine = Engine(tiny.model(), 8, 64, 8)
    jax.clear_caches()
    warm_up(engine, params, SAMPLING, 8)
    SEEN.clear()
    for count in (32, 9, 20, 3):
        tiny.respond(engine, params, QUEUE[:count], jax.random.key(count), SAMPLING, ROWS[:count])
    assert SEEN == [] and small["rows"] > 2


def test_every_layout_reaches_any_larger_one_through_neighbouring_layouts():
    """From each layout of a session to each with at least as many slots. Intermediate layouts have one tier, because the rows
    may not fit two."""
    sizes, counts = row_counts(64), slot_counts(320)
    assert (sizes, counts) == ([8, 16, 32, 64], [64, 128, 320])
    assert row_counts(64, 2) == [16, 64] and row_counts(64, 1.9) == sizes and row_counts(1, 9) == [1]
    assert (row_counts(3), row_counts(8), row_counts(16), row_counts(18)) == ([3], [4, 8], [4, 8, 16], [4, 5, 9, 18])
    every = [single(size, slots) for size in sizes for slots in counts] + [in_tiers(64, 320)]
    for layout in every:
        for target in every:
            if target.slots[-1] < layout.slots[-1]:
                continue
            at, steps = layout, 0
            while at != target:
                following = step_towards(target, at, sizes, counts)
                assert following in neighbours(at, sizes, counts)
                assert following == target or not following.tiered
                at, steps = following, steps + 1
            assert steps <= 8, (layout, target)


def test_tiers_need_an_even_number_of_slots_and_enough_rows():
    assert in_tiers(64, 320) == Layout((40, 24), (160, 320))
    assert in_tiers(7, 320) is None and in_tiers(64, 254) is None and in_tiers(64, 301) is None
    assert slot_counts(301)[-1] == 320 and slot_counts(39) == [64] and slot_counts(150) == [64, 160]


def test_a_ring_has_no_more_slots_than_the_longest_row_needs():
    assert slot_counts(39, limit=41) == [42] and slot_counts(150, limit=150) == [64, 150] and slot_counts(150, 999) == [64, 160]


@pytest.mark.parametrize(("platform", "sizes"), [("cpu", (4, 4)), ("gpu", (4, 64)), ("tpu", (4, 64))])
def test_prefills_on_a_cpu_have_one_size(platform, sizes, monkeypatch):
    """64 prompts of 32 tokens are 2,048 tokens, the largest prefill; a small one has a sixteenth of them."""
    monkeypatch.undo()
    assert layouts.prefill_sizes(32, 1, 64, platform) == sizes
