"""Continuous batching: the host's part. Rows that end leave their slots, and queued prompts enter while others decode.

All processes of a run decide alike: what they decide by are the prompts, and what every one of them fetches.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxalign.models.cache import Caches
from jaxalign.models.model import Model
from jaxalign.rollout.decode import NOT_FINITE, Drawn, decode_chunk
from jaxalign.rollout.ring import insert, prefill, reroll
from jaxalign.rollout.sampling import Sampling

STEPS = 32
"""Steps of decoding between two looks at the host."""
LEAST_SLOTS = 64
PREFILLED = 2048
"""Tokens of prompts, padding included, that are prefilled at once at most, if they are not one prompt."""
SHARES = (1, 2, 4, 8)
"""Of the slots there are all, a half or an eighth at work."""
FEW = 4
"""More prompts than so many small prefills take go into a large one."""
_TOKEN, _POSITION, _LEFT, _NUMBER = range(4)


@dataclasses.dataclass(frozen=True)
class Response:
    """One sampled response.

    ids: its tokens, the stop token, if any, included; ended: whether it ended by itself; logprob: the sum of `logprobs`, its
    tokens' log-probabilities at the sampling temperature; versions: of the weights that wrote each token (`Session.swap`);
    error: why there is no more of it, or None.
    """

    ids: tuple[int, ...]
    ended: bool
    logprob: float
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    error: str | None = None


@dataclasses.dataclass
class _Row:
    """A prompt with what has been written after it: (tokens, log-probs, version) of each chunk."""

    index: int
    prompt: tuple[int, ...]
    number: int
    pieces: list[tuple[np.ndarray, np.ndarray, int]] = dataclasses.field(default_factory=list)

    def response(self, stop_ids: tuple[int, ...], error: str | None) -> Response:
        ids = np.concatenate([piece[0] for piece in self.pieces]) if self.pieces else np.zeros(0, np.int32)
        logprobs = np.concatenate([piece[1] for piece in self.pieces]) if self.pieces else np.zeros(0, np.float32)
        versions = tuple(version for tokens, _, version in self.pieces for _ in tokens)
        ids = tuple(ids.tolist())
        ended = bool(ids) and ids[-1] in stop_ids
        return Response(ids, ended, float(logprobs.sum()), tuple(logprobs.tolist()), versions, error)


class Session:
    """Responses to a queue of prompts, chunk by chunk: `submit`, then `step` until nothing is `unfinished`.

    Between steps weights may be swapped and prompts added. Responses are handed over as they end and not kept, so a long
    queue needs no more memory than the prompts themselves and the rows at work.
    """

    def __init__(self, model: Model, params, key: jax.Array, sampling: Sampling, batch: int, max_length: int, bucket: int):
        self.model, self.key, self.max_length, self.bucket = model.generation, key, max_length, bucket
        self.source, self.params, self.version = model, model.for_generation(params), 0
        self.new = sampling.max_new_tokens
        # What is compiled does not hang on how many tokens are asked for.
        self.sampling = dataclasses.replace(sampling, max_new_tokens=1)
        self.parts = 1 if model.sharding is None else self.model.sharding.batch_size
        most = batch // self.parts
        self.sizes = sorted({-(-most // share) for share in SHARES})  # Rows of a part.
        self.queue: collections.deque[_Row] = collections.deque()
        self.waiting: collections.Counter[tuple[int, ...]] = collections.Counter()
        self.refused: list[tuple[int, Response]] = []
        self.submitted, self.longest = 0, 0
        self.live: dict[int, _Row] = {}
        self.rows, self.cache, self.slot = np.zeros((4, 0), np.int32), None, 0
        self.kept: tuple[Caches | None, dict] = (None, {})

    @property
    def unfinished(self) -> int:
        """How many of the prompts have no response yet."""
        return len(self.queue) + len(self.live) + len(self.refused)

    def submit(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Adds prompts to the queue, under the global row numbers `rows`. Their indices count on from those before."""
        added = []
        for prompt, number in zip(prompts, rows, strict=True):
            row = _Row(self.submitted, tuple(int(token) for token in prompt), int(number))
            self.submitted += 1
            refusal = refuse(row.prompt, self.new, self.max_length)
            if refusal is None:
                added.append(row)
            else:
                self.refused.append((row.index, row.response((), refusal)))
        # Equal prompts side by side, so that they are prefilled once; alike lengths too, so that little is padded.
        added.sort(key=lambda row: (len(row.prompt), row.prompt, row.index))
        self.queue.extend(added)
        self.waiting.update(row.prompt for row in added)
        self.longest = max([self.longest, *(self.padded(len(row.prompt)) for row in added)])

    def swap(self, params) -> None:
        """Goes on with other weights: what is written from now on has the next version. Keys and values of what was read and
        written before stay as the old weights made them."""
        self.params, self.version = self.source.for_generation(params), self.version + 1
        self.kept = (None, {})

    def step(self) -> list[tuple[int, Response]]:
        """One chunk. Returns what has ended: (index among the prompts submitted, its response)."""
        ended, self.refused = self.refused, []
        if not self.queue and not self.live:
            return ended
        self._fit()
        if self.queue and len(self.live) < self._size * self.parts:
            self._refill()
        ended += self._decode()
        if not self.queue and not self.live:
            self.cache = None
        return ended

    def written(self, index: int) -> tuple[int, ...]:
        """The tokens so far of a row that has not ended; of one that still waits, or has ended, none."""
        row = next((row for row in self.live.values() if row.index == index), None)
        return () if row is None else tuple(int(token) for piece in row.pieces for token in piece[0])

    @property
    def _size(self) -> int:
        """Rows of a part, now."""
        return self.rows.shape[1] // self.parts

    @property
    def _slots(self) -> int:
        return 0 if self.cache is None else self.cache[0].values.shape[3]

    def padded(self, length: int) -> int:
        """The length a prompt is padded to."""
        padded = self.bucket
        while padded < length:
            padded *= 2
        return max(1, min(padded, self.max_length - self.new))

    def _fit(self) -> None:
        """Makes the ring as large as what lives, and what is about to enter, needs for a chunk."""
        by_part = collections.Counter(slot // self._size for slot in self.live)
        wanted = max([*by_part.values(), -(-(len(self.live) + len(self.queue)) // self.parts)])
        size = next((size for size in self.sizes if size >= wanted), self.sizes[-1])
        entering = [len(row.prompt) for _, row in zip(range(size * self.parts - len(self.live)), self.queue, strict=False)]
        need = max([length - 1 + min(self.new, STEPS) for length in entering], default=1)
        if self.live:
            need = max(need, int(np.max(self.rows[_POSITION] + np.minimum(self.rows[_LEFT], STEPS))))
        slots = max(self._slots, next(slots for slots in slot_counts(self.longest + self.new) if slots >= need))
        if self.cache is None:
            self.empty(size, slots)
        while self._slots < slots:  # Step by step, so that few programs are needed.
            self.resize(self._size, next(larger for larger in slot_counts(self.longest + self.new) if larger > self._slots))
        while self._size != size:
            at = self.sizes.index(self._size)
            self.resize(self.sizes[at + 1 if size > self._size else at - 1], slots)

    def empty(self, size: int, slots: int) -> None:
        """A ring without a row."""
        self.cache = self.model.empty_cache(size * self.parts, slots)
        self.rows, self.slot = np.zeros((4, size * self.parts), np.int32), 0

    def resize(self, size: int, slots: int) -> None:
        """The live rows in a ring with other numbers of rows of a part, or of slots."""
        index, live = np.zeros((self.parts, size), np.int32), {}
        rows = np.zeros((4, self.parts * size), np.int32)
        taken = [0] * self.parts
        for slot in sorted(self.live):
            part, place = divmod(slot, self._size)
            index[part, taken[part]] = place
            rows[:, part * size + taken[part]] = self.rows[:, slot]
            live[part * size + taken[part]] = self.live[slot]
            taken[part] += 1
        self.cache = reroll(self.model, self.cache, self._place(index, ("batch", None)), np.int32(self.slot), slots)
        self.rows, self.live, self.slot = rows, live, 0

    def _refill(self) -> None:
        """Fills free slots from the queue. Each part of the mesh prefills what enters its own slots."""
        size = self._size
        free = [[slot for slot in range(part * size, (part + 1) * size) if slot not in self.live] for part in range(self.parts)]
        kept, known = self.kept
        again, fresh = [[] for _ in free], [{} for _ in free]  # (slot, source, length); prompt: slots
        for _ in range(min(len(self.queue), sum(map(len, free)))):
            row = self.queue.popleft()
            self._count_out(row.prompt)
            open_parts = [part for part in range(self.parts) if free[part]]
            beside = [part for part in open_parts if (part, row.prompt) in known or row.prompt in fresh[part]]
            part = max(beside or open_parts, key=lambda part: len(free[part]))
            slot = free[part].pop(0)
            self.live[slot] = row
            last = len(row.prompt) - 1
            self.rows[:, slot] = row.prompt[last], last, self.new, row.number
            if (part, row.prompt) in known:
                again[part].append((slot - part * size, known[part, row.prompt], last))
            else:
                fresh[part].setdefault(row.prompt, []).append(slot - part * size)
        if any(again):
            self.enter(kept, again)
        del kept
        for group in self._groups(fresh):
            self._prefill(*group, fresh)
        if not any(prompt in self.waiting for _, prompt in self.kept[1]):
            self.kept = (None, {})

    def _count_out(self, prompt: tuple[int, ...]) -> None:
        self.waiting[prompt] -= 1
        if not self.waiting[prompt]:
            del self.waiting[prompt]

    def _groups(self, fresh: list[dict]) -> list[tuple[int, int, list[list]]]:
        """(padded length, how many rows of a part, the prompts of each part) of each prefill."""
        lengths = sorted({self.padded(len(prompt)) for part in fresh for prompt in part})
        groups = []
        for length in lengths:
            left = [[prompt for prompt in part if self.padded(len(prompt)) == length] for part in fresh]
            few, most = prefill_sizes(length, self.parts, self.sizes[-1])
            while any(left):
                rows = few if max(map(len, left)) <= FEW * few else most
                groups.append((length, rows, [prompts[:rows] for prompts in left]))
                left = [prompts[rows:] for prompts in left]
        return groups

    def _prefill(self, length: int, count: int, prompts: list[list], fresh: list[dict]) -> None:
        tokens = np.zeros((self.parts, count, length), np.int32)
        plan, known = [[] for _ in prompts], {}
        for part, own in enumerate(prompts):
            for source, prompt in enumerate(own):
                tokens[part, source, : len(prompt)] = prompt
                plan[part] += [(slot, source, len(prompt) - 1) for slot in fresh[part][prompt]]
                if prompt in self.waiting:
                    known[part, prompt] = source
        made = self.prefill(tokens)
        self.enter(made, plan)
        if known:
            self.kept = made, known

    def prefill(self, tokens: np.ndarray) -> Caches:
        """Keys and values of prompts int32 [parts, R, P]."""
        tokens = self._place(tokens.reshape(-1, tokens.shape[-1]), ("batch", None))
        return prefill(self.model, self.params, tokens)

    def enter(self, made: Caches, plan: list[list[tuple[int, int, int]]]) -> None:
        """Puts prefilled prompts into slots: for each part (row, which prompt, how many of its tokens)."""
        table = np.full((self.parts, self._size, 3), -1, np.int32)
        for part, entries in enumerate(plan):
            table[part, : len(entries)] = np.asarray(entries, np.int32).reshape(-1, 3)
        table = self._place(table, ("batch", None, None))
        self.cache = insert(self.model, self.cache, made, table, np.int32(self.slot))

    def chunk(self) -> Drawn:
        """Decodes all rows for a while; on the host."""
        control = np.asarray([self.slot, min(STEPS, int(self.rows[_LEFT].max())), self._quota()], np.int32)
        rows = self._place(self.rows, (None, "batch"))
        self.cache, drawn = decode_chunk(
            self.model, self.params, self.cache, rows, self.key, control, self.sampling, STEPS
        )
        drawn = jax.device_get(drawn)
        self.slot = (self.slot + int(drawn.steps)) % self._slots
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
            self.rows[_LEFT, slot] -= count
            if count:
                self.rows[_TOKEN, slot] = tokens[-1]
            error = "the model's logits are not finite numbers" if broken[slot] else None
            stopped = count and int(tokens[-1]) in self.sampling.stop_ids
            if error or stopped or self.rows[_LEFT, slot] <= 0:
                self.rows[:, slot] = 0
                ended.append((row.index, self.live.pop(slot).response(self.sampling.stop_ids, error)))
        return ended

    def _quota(self) -> int:
        """After how many ended rows a chunk is over: enough to fill, or to halve the rows; else all."""
        if self.queue:
            return max(1, self._size * self.parts // 16)
        smaller = [size for size in self.sizes if size < self._size]
        spare = len(self.live) - (smaller[-1] * self.parts if smaller else 0)
        return spare if spare > 0 else len(self.live)

    def _place(self, array: np.ndarray, axes: tuple[str | None, ...]):
        sharding = self.model.sharding
        if sharding is None:
            return array
        return jax.make_array_from_callback(array.shape, sharding.named(axes), lambda index: array[index])


def slot_counts(most: int) -> list[int]:
    """The sizes of a ring that grows up to `most` slots."""
    counts = [LEAST_SLOTS]
    while counts[-1] < most:
        counts.append(2 * counts[-1])
    return [*counts[:-1], most]


def prefill_sizes(length: int, parts: int, slots: int) -> tuple[int, int]:
    """How many prompts of this length each part of the rows, with so many slots, prefills at once: a few, or the most that
    there are. Powers of two."""
    most = min(PREFILLED // (length * parts), slots)
    most = 1 << max(0, most.bit_length() - 1)
    return max(1, most // 16), most


def refuse(prompt: Sequence[int], new: int, max_length: int) -> str | None:
    """Why a prompt cannot be answered with so many new tokens, or None."""
    if not prompt:
        return "a prompt is empty; at least one token is expected"
    limit = max_length - new
    if len(prompt) > limit:
        return (
            f"a prompt has {len(prompt)} tokens, but model.max_length {max_length} less {new} new tokens leaves room for "
            f"{limit}; raise model.max_length or shorten the prompt"
        )
    return None
