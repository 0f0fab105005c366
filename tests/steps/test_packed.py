"""Packing of sequences: every valid token occurs once in a row and can be located."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.models.attention.plain import STEM
from jaxalign.records import Rollout
from jaxalign.steps.packed import each_part, of_answers, pack_answers, part_rows

T, N = 24, 12


def rollout(seed: int, B: int) -> Rollout:
    """Random lengths, each token different from all others."""
    rng = np.random.default_rng(seed)
    prompt, answer = rng.integers(1, T - N + 1, B).astype(np.int32), rng.integers(1, N + 1, B).astype(np.int32)
    prompt[0], answer[0] = T - N, N
    tokens = np.arange(1, B * T + 1, dtype=np.int32).reshape(B, T)
    tokens = np.where(np.arange(T)[None] < (prompt + answer)[:, None], tokens, 0)
    return Rollout(tokens, prompt, answer, np.zeros((B, N), np.float32), np.ones(B, bool))


@pytest.mark.parametrize(("seed", "rows"), [(0, 1), (1, 2), (2, 4), (3, 16)])
def test_rows_hold_every_counted_token_once_and_each_answer_is_found(seed, rows):
    made, counted = rollout(seed, 32), np.random.default_rng(seed).random(32) < 0.8
    groups = np.random.default_rng(seed).permutation(32).reshape(2, 16)
    given = made.tokens, made.prompt_length, made.response_length
    plan = pack_answers(*given, groups, counted, rows, 16 // rows)
    for g, group in enumerate(groups):
        own, inside = jax.tree.map(lambda x: x[g], plan), counted[group]  # noqa: B023
        real = own.rows.segment_ids > 0
        expected = made.tokens[group][inside]
        np.testing.assert_array_equal(np.sort(own.rows.tokens[real]), np.sort(expected[expected > 0]))
        assert (own.part[~inside] == -1).all() and (np.unique(own.part[inside]) == np.arange(own.count)).all()
        assert not real[int(own.count) :].any()
        answers = np.zeros((own.count, rows), int)
        np.add.at(answers, (own.part[inside], own.rows.first[inside] // T), made.response_length[group][inside])
        np.testing.assert_array_equal(own.rows.used[: own.count], answers.max(-1))
        for i in np.flatnonzero(inside):
            P, A = made.prompt_length[group[i]], made.response_length[group[i]]
            part, (row, at) = own.part[i], divmod(own.rows.start[i], T)
            span = np.s_[part, row, at : at + P + A]
            np.testing.assert_array_equal(own.rows.tokens[span], made.tokens[group[i], : P + A])
            np.testing.assert_array_equal(own.rows.positions[span], np.arange(P + A))
            assert len(np.unique(own.rows.segment_ids[span])) == 1
            assert (own.rows.segment_ids[part, row] == own.rows.segment_ids[part, row, at]).sum() == P + A
            heads = own.rows.heads[part].reshape(-1)[own.rows.first[i] : own.rows.first[i] + A]
            np.testing.assert_array_equal(heads, at + P - 1 + np.arange(A))
            assert own.rows.first[i] // T == row


def test_almost_all_rows_are_full():
    """1000 lengths from 1 to T, T / 2 on average: all but a few rows are full."""
    lengths = np.random.default_rng(0).integers(1, T // 2 + 1, 1000).astype(np.int32)
    tokens = np.ones((1000, T), np.int32)
    plan = pack_answers(tokens, lengths, 0 * lengths, [np.arange(1000)], np.ones(1000, bool), 1, 1000)
    assert int(plan.count[0]) <= 1.01 * -(-lengths.sum() // T)


@pytest.mark.parametrize("ways", [1, 2, 4])
def test_pairs_share_a_device_and_devices_have_about_equal_numbers_of_tokens(ways):
    made, counted = rollout(7, 64), np.repeat(np.random.default_rng(7).random(32) < 0.8, 2)
    prompts, answers = made.prompt_length, made.response_length
    plan = pack_answers(made.tokens, prompts, answers, [np.arange(64)], counted, 8, 8, ways, 2)
    np.testing.assert_array_equal(plan.part[0, ::2], plan.part[0, 1::2])
    filled = (plan.rows.segment_ids[0, : plan.count[0] - 1] > 0).sum(-1).reshape(-1, ways, 8 // ways).sum(-1)
    assert (filled > 0).all() and (np.ptp(filled, axis=1) <= T).all()


def test_the_shared_prefix_of_a_pair_is_stored_once():
    """All tokens differ except the shared ones: 3 tokens of the second pair, and all but the last two of the third."""
    tokens = np.arange(1, 6 * T + 1, dtype=np.int32).reshape(6, T)
    prompts, answers = np.asarray([4, 5, 8, 6, 9, 9], np.int32), np.asarray([9, 3, 2, 11, 1, 1], np.int32)
    common = np.asarray([0, 0, 3, 3, 8, 8])
    tokens[3, :3], tokens[5, :8] = tokens[2, :3], tokens[4, :8]
    every = [np.arange(6)], np.ones(6, bool)
    plan = jax.tree.map(lambda x: x[0], pack_answers(tokens, prompts, answers, *every, 2, 3, 1, 2, common))
    length = prompts + answers
    written, counts = np.unique(plan.rows.tokens[plan.rows.segment_ids > 0], return_counts=True)
    expected = {int(token) for i in range(6) for token in tokens[i, : length[i]]}
    assert set(written.tolist()) == expected and (counts == 1).all()
    rows, ids, positions = (x.reshape(3, -1) for x in (plan.rows.tokens, plan.rows.segment_ids, plan.rows.positions))
    for i in range(6):
        part, stem, first = plan.part[i], common[i], plan.rows.start[i - i % 2]
        own = np.r_[first : first + stem, plan.rows.start[i] + stem : plan.rows.start[i] + length[i]]
        np.testing.assert_array_equal(rows[part, own], tokens[i, : length[i]])
        np.testing.assert_array_equal(positions[part, own], np.arange(length[i]))
        document, branch = ids[part, own] % STEM, ids[part, own] // STEM
        assert len(set(document)) == 1 and own[0] // T == own[-1] // T
        np.testing.assert_array_equal(branch, np.where(np.arange(length[i]) < stem, 0, 1 + i % 2 if stem else 0))
        heads = plan.rows.heads[part].reshape(-1)[plan.rows.first[i] : plan.rows.first[i] + answers[i]]
        np.testing.assert_array_equal(rows[part, heads + own[-1] // T * T + 1], tokens[i, prompts[i] : length[i]])


def test_each_part_is_computed_and_uncounted_rows_are_skipped():
    made = rollout(5, 8)
    counted, given = np.arange(8) != 3, (made.tokens, made.prompt_length, made.response_length)
    plan = jax.tree.map(lambda x: jnp.asarray(x[0]), pack_answers(*given, [np.arange(8)], counted, 2, 4))

    def fn(rows):
        following = jnp.take_along_axis(rows.tokens, jnp.minimum(rows.heads + 1, T - 1), axis=1)
        return {"tokens": of_answers(following, rows.first, N)}

    found = jax.jit(lambda plan: each_part(plan, fn))(plan)["tokens"]
    for i in range(8):
        P, A = made.prompt_length[i], made.response_length[i]
        np.testing.assert_array_equal(found[i, :A], made.tokens[i, P : P + A] * counted[i])


@pytest.mark.parametrize(("sequences", "T", "tokens", "ways", "unit", "expected"), [
    (64, 288, 0, 1, 1, (4, 16)),  # a sixteenth of the rows
    (64, 96, 0, 1, 1, (8, 8)),  # at least 768 tokens
    (17, 96, 0, 1, 1, (6, 3)),  # evenly divided
    (128, 96, 0, 8, 8, (64, 2)),  # 768 tokens on each device
    (64, 100, 1000, 1, 1, (10, 7)),
    (64, 100, 250, 4, 4, (8, 8)),  # two rows per device
    (64, 100, 10**9, 1, 1, (64, 1)),
    (12, 100, 0, 4, 8, (16, 1)),  # two rows per device for two pipeline stages
])
def test_the_size_of_a_part(sequences, T, tokens, ways, unit, expected):
    rows, most = part_rows(sequences, T, tokens, ways, unit)
    assert (rows, most) == expected and rows * most >= sequences and rows % unit == 0


def test_a_part_smaller_than_one_row_is_refused():
    with pytest.raises(UserError, match="micro_batch_tokens is 99; at least 100 are needed for rows of 100"):
        part_rows(8, 100, 99)
    with pytest.raises(UserError, match="at least 200 are needed"):
        part_rows(8, 100, 199, 4, 8)
