"""The host side of continuous batching: rows that end free their slots, and queued prompts enter while others decode.

All processes of a run make the same decisions, since these depend only on the prompts and on arrays that every process fetches.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxalign.errors import UserError
from jaxalign.models.cache import Caches, Tiers, empty_rings
from jaxalign.models.model import Model
from jaxalign.rollout.layouts import Layout, in_tiers, prefill_groups, row_counts, single, slot_counts, step_towards
from jaxalign.rollout.prefills import Fresh, Plan, Prefills
from jaxalign.rollout.prefixes import shared_prefills
from jaxalign.rollout.responses import BROKEN, Response, SampledRow, refuse
from jaxalign.rollout.ring import NOT_FINITE, Drawn, decode_program, exchange, insert, prefill, prefill_after, reroll
from jaxalign.rollout.sampling import Sampling, Variant

STEPS = 32
"""The maximum number of decoding steps of a chunk; after each chunk the host reads the tokens."""
AHEAD = 8
"""When a chunk begins, a row of the short tier must have slots for this many more steps."""
_TOKEN, _POSITION, LEFT, _NUMBER, _SETTINGS = range(5)  # The first axis of `Session.rows`; settings are its last entries.


class Session:
    """Responses to a queue of prompts, chunk by chunk: `submit`, then `step` until nothing is `unfinished`.

    Between steps, weights may be swapped and prompts added. Settings and keys belong to the row: rows with different ones
    decode together. A session does not keep the responses that it has returned.
    """

    def __init__(
        self, model: Model, params, batch: int, max_length: int, bucket: int, version: int = 0, share_prefix: bool = False,
    ):
        self.model, self.max_length, self.bucket = model.generation, max_length, bucket
        self.source, self.params, self.version = model, model.for_generation(params), version
        self.variant: Variant | None = None  # Of all submitted rows, also those that have ended.
        self.fields, self.least_new = 0, max_length  # The settings of a row, and the least max_new_tokens of a row.
        self.stops = False  # Whether a row has stop tokens.
        self.parts = self.model.sharding.batch_size
        self.batch, self.sizes = batch, row_counts(batch // self.parts)  # Rows of a part.
        self.queue: collections.deque[SampledRow] = collections.deque()
        self.refused: list[tuple[int, Response]] = []
        self.submitted, self.longest = 0, 0  # Prompts; the length of the longest row, with its prompt padded.
        self.prefills = Prefills(self.parts, share_prefix and self.model.continues)
        self.live: dict[int, SampledRow] = {}
        self.tiers: Tiers | None = None
        self.layout, self.rows, self.slot = Layout((), ()), np.zeros((_SETTINGS, 0), np.int32), 0

    @property
    def unfinished(self) -> int:
        """The number of prompts without a response."""
        return len(self.queue) + len(self.live) + len(self.refused)

    def submit(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], key: jax.Array, sampling: Sampling) -> None:
        """Adds prompts to the queue. Their indices continue those of earlier prompts.

        Args:
          prompts: token ids.
          rows: the global row number of each prompt.
          key: a PRNG key, for example a run's key folded with its step.
          sampling: the sampling settings of these prompts.

        Raises:
          UserError: a row number is not an int32 of at least 0, or the key has another implementation than earlier keys;
            nothing was added.
          ValueError: the numbers of prompts and row numbers differ; nothing was added.
        """
        strange = next((row for row in rows if not (isinstance(row, int | np.integer) and 0 <= row < 1 << 31)), None)
        if strange is not None:
            raise UserError(f"a row number is {strange}; an integer from 0 to {(1 << 31) - 1} is expected")
        if len(prompts) != len(rows):
            raise ValueError(f"there are {len(prompts)} prompts and {len(rows)} row numbers; one for each is expected")
        self._prepare(sampling, jax.random.key_impl(key))
        settings, added = sampling.packed(key), []
        for prompt, number in zip(prompts, rows, strict=True):
            refusal = refuse(prompt, sampling.max_new_tokens, self.max_length, self.model.config.vocab)
            row = SampledRow(self.submitted, () if refusal else tuple(map(int, prompt)), int(number), sampling, settings)
            self.submitted += 1
            if refusal is None:
                added.append(row)
            else:
                self.refused.append((row.index, row.response(refusal)))
        self.enqueue(added)

    def enqueue(self, added: list[SampledRow]) -> None:
        """Adds rows to the queue, all of which fit."""
        self.prefills.enqueue(added)
        self.queue.extend(added)
        if self.tiers is None:  # Decoding that has begun keeps its sizes.
            self.sizes = row_counts(self.batch // self.parts, len(self.queue) / self.batch)
        self.longest = max([self.longest, *(self.padded(len(row.prompt)) + row.sampling.max_new_tokens for row in added)])

    def _prepare(self, sampling: Sampling, key_impl: Any) -> None:
        """Extends the session's programs and arrays to rows with these settings."""
        variant = sampling.variant(key_impl)
        if self.variant is not None and self.variant.key_impl != key_impl:
            raise UserError(f"the key has the implementation {key_impl}, but rows of the same batch have "
                            f"{self.variant.key_impl}; make all keys of a sampler with one implementation")
        self.variant = variant if self.variant is None else self.variant.joined(variant)
        self.stops = self.stops or bool(sampling.stop_ids)
        self.least_new, self.longest = min(self.least_new, sampling.max_new_tokens), max(self.longest, sampling.max_new_tokens)
        self.fields = max(self.fields, variant.fields(len(sampling.stop_ids)))
        more = _SETTINGS + self.fields - len(self.rows)
        self.rows = np.pad(self.rows, ((0, more), (0, 0)), constant_values=-1)  # -1 equals no token: not a stop id.

    def swap(self, params, version: int | None = None) -> None:
        """Continues with other weights. Tokens sampled from now on have this version (None: the next one). Keys and values of
        earlier tokens stay as the old weights computed them."""
        self.params = self.source.for_generation(params)
        self.version = self.version + 1 if version is None else version
        self.prefills.kept, self.prefills.unread = [], {}

    def step(self) -> list[tuple[int, Response]]:
        """Decodes one chunk and returns the responses that ended, as (index among the submitted prompts, response)."""
        ended, self.refused = self.refused, []
        if not self.queue and not self.live:
            return ended
        self._fit()
        if self.queue and len(self.live) < self.layout.size * self.parts:
            self._refill()
        if self.layout.tiered:
            self._exchange()
        ended += self._decode()
        if not self.queue and not self.live:
            self.tiers = None
        return ended

    def written(self, index: int) -> tuple[int, ...]:
        """The tokens so far of a row that is being decoded; empty for a row that is queued or has ended."""
        row = next((row for row in self.live.values() if row.index == index), None)
        return () if row is None else tuple(int(token) for piece in row.pieces for token in piece[0])

    def padded(self, length: int) -> int:
        """The padded length of a prompt."""
        padded = self.bucket
        while padded < length:
            padded *= 2
        return max(1, min(padded, self.max_length - self.least_new))

    def _fit(self) -> None:
        """Resizes the ring for one chunk of the live rows and the rows about to enter."""
        by_part = collections.Counter(slot // self.layout.size for slot in self.live)
        wanted = max([*by_part.values(), -(-(len(self.live) + len(self.queue)) // self.parts)])
        size = next((size for size in self.sizes if size >= wanted), self.sizes[-1])
        entering = list(itertools.islice(self.queue, size * self.parts - len(self.live)))
        need = max([row.reach(STEPS) for row in entering], default=1)
        if self.live:
            need = max(need, int(self._reach(STEPS).max()))
        counts = slot_counts(self.longest, self.max_length)
        slots = next(slots for slots in counts if slots >= need)
        if self.tiers is not None:
            slots = max(slots, self.layout.slots[-1])
        largest = (size, slots) == (self.sizes[-1], counts[-1])
        target = (self._in_tiers(size, slots, entering) if largest else None) or single(size, slots)
        if self.tiers is None:
            self.empty(target)
        while self.layout != target:
            self.relayout(step_towards(target, self.layout, self.sizes, counts))

    def _reach(self, steps: int) -> np.ndarray:
        """int32: the number of tokens of each row after `steps` more steps, if it does not end."""
        return self.rows[_POSITION] + np.minimum(self.rows[LEFT], steps)

    def _in_tiers(self, size: int, slots: int, entering: list[SampledRow]) -> Layout | None:
        """The two-tier layout of `size` rows and `slots` if the live and the entering rows fit, otherwise None. Changing to two
        tiers needs more free slots than staying. Without stop tokens all rows become equally long, so one tier suffices."""
        layout = in_tiers(size, slots) if self.stops else None
        if layout is None or any(row.reach(AHEAD) > layout.slots[0] for row in entering):
            return None
        steps = AHEAD if self.layout.tiered else 2 * AHEAD
        outgrown = np.flatnonzero(self._reach(steps) > layout.slots[0]).tolist()
        long = collections.Counter(slot // self.layout.size for slot in outgrown)
        return layout if max(long.values(), default=0) <= layout.rows[1] else None

    def empty(self, layout: Layout) -> None:
        """Starts with empty rings."""
        self.tiers, self.layout, self.slot = self.rings(layout), layout, 0
        self.rows = np.zeros((_SETTINGS + self.fields, layout.size * self.parts), np.int32)

    def rings(self, layout: Layout) -> Tiers:
        """Rings without tokens."""
        rings = zip(*layout, strict=True)
        return empty_rings(tuple(self.model.abstract_cache(rows * self.parts, slots) for rows, slots in rings))

    def call(self, step: Callable, *arguments):
        """Runs a jitted program. Every program of a session runs through this method."""
        return step(*arguments)

    def relayout(self, layout: Layout) -> None:
        """Moves the live rows to rings of another layout."""
        index, live = np.zeros((self.parts, layout.size), np.int32), {}
        rows = np.zeros((len(self.rows), layout.size * self.parts), np.int32)
        for part in range(self.parts):
            for new, old in self._places(part, layout).items():
                slot, at = part * self.layout.size + old, part * layout.size + new
                index[part, new] = old
                rows[:, at], live[at] = self.rows[:, slot], self.live[slot]
        index = self._place(index, ("batch", None))
        self.tiers = self.call(reroll, self.model, self.tiers, index, np.int32(self.slot), layout)
        self.layout, self.rows, self.live, self.slot = layout, rows, live, 0

    def _places(self, part: int, layout: Layout) -> dict[int, int]:
        """{new index: old index} of a part's live rows. In two tiers, short rows go to the short tier."""
        begin = part * self.layout.size
        old = [slot - begin for slot in sorted(self.live) if slot // self.layout.size == part]
        if not layout.tiered:
            return dict(enumerate(old))
        reach = self._reach(AHEAD)
        old.sort(key=lambda place: int(reach[begin + place]))
        short = sum(int(reach[begin + place]) <= layout.slots[0] for place in old)
        short = min(short, layout.rows[0])
        return dict(enumerate(old[:short])) | dict(enumerate(old[short:], layout.rows[0]))

    def _exchange(self) -> None:
        """Swaps rows that outgrow the short tier with free or short rows of the long tier."""
        short, most = self.layout.rows[0], self.layout.slots[0]
        reach = np.where(self.rows[LEFT] > 0, self._reach(AHEAD), 0).reshape(self.parts, -1)
        plan = np.full((self.parts, self.layout.rows[1], 2), -1, np.int32)
        for part, own in enumerate(reach):
            outgrown = np.flatnonzero(own[:short] > most)
            room = short + np.argsort(own[short:], kind="stable")[: len(outgrown)]
            plan[part, : len(outgrown)] = np.stack([outgrown, room - short], axis=1)
            begin = part * self.layout.size
            for pair in zip((begin + outgrown).tolist(), (begin + room).tolist(), strict=True):
                self.rows[:, pair] = self.rows[:, pair[::-1]]
                here, there = (self.live.pop(slot, None) for slot in pair)
                self.live |= {slot: row for slot, row in zip(pair, (there, here), strict=True) if row is not None}
        if (plan >= 0).any():
            self.exchange(plan)

    def exchange(self, plan: np.ndarray) -> None:
        """Swaps rows between the tiers. plan: as for `ring.exchange`."""
        plan = self._place(plan, ("batch", None, None))
        self.tiers = self.call(exchange, self.model, self.tiers, plan, np.int32(self.slot))

    def _refill(self) -> None:
        """Fills free rows from the queue. Each part of the mesh prefills the prompts that enter its own rows."""
        size, prefills = self.layout.size, self.prefills
        free = [[slot for slot in range(part * size, (part + 1) * size) if slot not in self.live] for part in range(self.parts)]
        known = {key: at for at, (_, places) in enumerate(prefills.kept) for key in places}
        again: list[Plan] = [[[] for _ in free] for _ in prefills.kept]
        fresh: Fresh = [{} for _ in free]
        for _ in range(min(len(self.queue), sum(map(len, free)))):
            row = self.queue.popleft()
            part = prefills.dequeue(row.prompt, free, fresh, known)
            slot = free[part].pop(0)
            self.live[slot] = row
            last = len(row.prompt) - 1
            self.rows[:_SETTINGS, slot] = row.prompt[last], last, row.sampling.max_new_tokens, row.number
            self.rows[_SETTINGS:, slot] = -1
            self.rows[_SETTINGS : _SETTINGS + len(row.settings), slot] = row.settings
            if (part, row.prompt) in known:
                at = known[part, row.prompt]
                again[at][part].append((slot - part * size, prefills.kept[at][1][part, row.prompt], last))
                row.reused = prefills.unread.pop((part, row.prompt), last)
            else:
                fresh[part].setdefault(row.prompt, []).append((slot - part * size, row))
        for at, plan in enumerate(again):
            if any(plan):
                self.enter(prefills.kept[at][0], plan)
        prefills.forget()
        self._prefill(fresh)
        waiting = {prompt for prompt, group in prefills.related.items() if any(x in prefills.waiting for x in group.prompts)}
        prefills.related = {prompt: group for prompt, group in prefills.related.items() if prompt in waiting}

    def _prefill(self, fresh: Fresh) -> None:
        """Prefills the entering prompts that are not kept: first groups with a common prefix, then the others."""
        platform = self.model.sharding.platform
        for shared in shared_prefills(self.prefills.groups(fresh), self.bucket, self.sizes[-1], platform):
            arrays = [self._place(x, ("batch", None)[: x.ndim]) for x in shared.arrays()]
            caches = self.call(prefill_after, self.model, self.params, *arrays)
            self.enter(caches, self.prefills.plan(caches, shared.sources(), fresh))
            del caches  # Free them, unless they are kept, before the next prefill.
        for length, count, prompts in prefill_groups(fresh, self.padded, self.sizes[-1], platform):
            tokens = np.zeros((self.parts, count, length), np.int32)
            for part, entering in enumerate(prompts):
                for source, prompt in enumerate(entering):
                    tokens[part, source] = prompt[-1]  # Pad with its last token: a different one might select other experts.
                    tokens[part, source, : len(prompt)] = prompt
            caches = self.prefill(tokens)
            sources = [[(prompt, source, 0) for source, prompt in enumerate(entering)] for entering in prompts]
            self.enter(caches, self.prefills.plan(caches, sources, fresh))
            del caches

    def prefill(self, tokens: np.ndarray) -> Caches:
        """Keys and values of prompts int32 [parts, R, P]."""
        tokens = self._place(tokens.reshape(-1, tokens.shape[-1]), ("batch", None))
        return self.call(prefill, self.model, self.params, tokens)

    def enter(self, caches: Caches, plan: Plan) -> None:
        """Writes prefilled prompts into rows."""
        tiers = len(self.layout.rows)
        table = np.full((self.parts, tiers, max(self.layout.rows), 3), -1, np.int32)
        for part, entries in enumerate(plan):
            taken = [0] * tiers
            for row, *rest in entries:
                tier, place = self.layout.tier(row)
                table[part, tier, taken[tier]] = place, *rest
                taken[tier] += 1
        table = self._place(table, ("batch", None, None, None))
        self.tiers = self.call(insert, self.model, self.tiers, caches, table, np.int32(self.slot))

    def chunk(self) -> Drawn:
        """Decodes one chunk of all rows and fetches the tokens to the host."""
        steps = int(self.rows[LEFT].max())
        if self.layout.tiered:  # Every row of the short tier needs enough slots.
            slots, short = self.layout.slots[0], np.s_[:, : self.layout.rows[0]]
            reach, position = (x.reshape(self.parts, -1)[short] for x in (self._reach(STEPS), self.rows[_POSITION]))
            steps = min(steps, int(np.min(slots - position, initial=STEPS, where=reach > slots)))
        # The number of ended rows after which to stop: enough to refill rows or to shrink the batch; otherwise all.
        if self.queue:
            quota = max(1, self.layout.size * self.parts // 16)
        else:
            smaller = [size for size in self.sizes if size < self.layout.size]
            spare = len(self.live) - (smaller[-1] * self.parts if smaller else 0)
            quota = spare if spare > 0 else len(self.live)
        control = np.asarray([self.slot, min(steps, STEPS), quota], np.int32)
        rows = self._place(self.rows, (None, "batch"))
        step = decode_program(self.model, self.params)
        self.tiers, drawn = self.call(step, self.model, self.params, self.tiers, rows, control, self.variant, STEPS)
        drawn = jax.device_get(drawn)
        self.slot = (self.slot + int(drawn.steps)) % self.layout.slots[-1]
        return drawn

    def _decode(self) -> list[tuple[int, Response]]:
        drawn = self.chunk()
        counts = (drawn.tokens >= 0).sum(axis=0)
        broken = (drawn.tokens == NOT_FINITE).any(axis=0)
        ended = []
        for slot, row in list(self.live.items()):
            count = int(counts[slot])
            tokens = drawn.tokens[:count, slot].copy()
            row.pieces.append((tokens, drawn.logprobs[:count, slot].copy(), self.version))
            self.rows[_POSITION, slot] += count
            self.rows[LEFT, slot] -= count
            if count:
                self.rows[_TOKEN, slot] = tokens[-1]
            error = BROKEN if broken[slot] else None
            stopped = count and int(tokens[-1]) in row.sampling.stop_ids
            if error or stopped or self.rows[LEFT, slot] <= 0:
                self.rows[:, slot] = 0
                ended.append((row.index, self.live.pop(slot).response(error)))
        return ended

    def _place(self, array: np.ndarray, axes: tuple[str | None, ...]):
        return jax.make_array_from_callback(array.shape, self.model.sharding.named(axes), lambda index: array[index])
