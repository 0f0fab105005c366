"""The prompts of a session's queue that are prefilled together, and the prefills that are kept for rows that still wait."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from jaxalign.models.cache import Caches
from jaxalign.rollout.prefixes import Related, related
from jaxalign.rollout.responses import SampledRow

KEPT = 4
"""The maximum number of prefills that are kept for prompts that will be sampled again."""

Prompt = tuple[int, ...]
Fresh = list[dict[Prompt, list[tuple[int, SampledRow]]]]
"""The prompts to prefill in each part of the mesh, with the rows that they enter: (index within the part, row)."""
Plan = list[list[tuple[int, int, int]]]
"""For each part of the mesh, entries (row of the part, index of the prefilled prompt, number of its tokens but the last)."""


class Prefills:
    """The bookkeeping of the prefills of one session. On a mesh each part prefills the prompts that enter its own rows.

    Attributes:
      parts: the number of parts into which the mesh splits rows.
      shares: whether different prompts with a common prefix compute it once.
      waiting: the number of queued rows of each prompt.
      related: the group of a queued prompt that shares a prefix.
      kept: prefills for prompts that will be sampled again, each with the index of (part, prompt) in it.
      unread: `Response.reused` of the next row of (part, prompt).
    """

    def __init__(self, parts: int, shares: bool):
        self.parts, self.shares = parts, shares
        self.waiting: collections.Counter[Prompt] = collections.Counter()
        self.related: dict[Prompt, Related] = {}
        self.kept: list[tuple[Caches, dict[tuple[int, Prompt], int]]] = []
        self.unread: dict[tuple[int, Prompt], int] = {}

    def enqueue(self, rows: list[SampledRow]) -> None:
        """Counts rows as waiting, and sorts them so that equal prompts are adjacent and prefilled once, and similar lengths are
        adjacent and need little padding. A group of related prompts follows its shortest prompt."""
        rows.sort(key=lambda row: (len(row.prompt), row.prompt, row.index))
        if self.shares:
            groups = related(list({row.prompt: None for row in rows}))
            self.related |= {prompt: group for group in groups for prompt in group.prompts}

            def order(row: SampledRow) -> tuple:
                group = self.related[row.prompt].prompts if row.prompt in self.related else (row.prompt,)
                first = min(group, key=lambda prompt: (len(prompt), prompt))
                return len(first), first, len(row.prompt), row.prompt

            rows.sort(key=order)
        self.waiting.update(row.prompt for row in rows)

    def dequeue(self, prompt: Prompt, free: Sequence[Sequence[int]], fresh: Fresh, known: dict) -> int:
        """Counts a row out of the queue and returns the part of the mesh that it enters: one that has or will have the keys and
        values of its prompt or a related one, if possible; among those, the one with the most free rows.

        free: the free rows of each part. known: the (part, prompt) of kept prefills.
        """
        self.waiting[prompt] -= 1
        if not self.waiting[prompt]:
            del self.waiting[prompt]
        open_parts = [part for part in range(self.parts) if free[part]]
        group = self.related[prompt].prompts if prompt in self.related else (prompt,)
        beside = [part for part in open_parts if (part, prompt) in known or any(x in fresh[part] for x in group)]
        return max(beside or open_parts, key=lambda part: len(free[part]))

    def groups(self, fresh: Fresh) -> list[list[Related]]:
        """The groups to prefill in each part of the mesh: entering prompts, and without a mesh those of the same group that
        still wait. On a mesh the latter might enter another part."""
        groups_of_parts, known = [], {key for _, places in self.kept for key in places}
        for part, entering in enumerate(fresh):
            groups = {group.prompts: group for group in map(self.related.get, entering) if group is not None}
            needed = [
                group._replace(prompts=tuple(
                    x for x in group.prompts
                    if x in entering or (self.parts == 1 and x in self.waiting and (part, x) not in known)
                ))
                for group in groups.values()
            ]
            groups_of_parts.append([group for group in needed if len(group.prompts) > 1])
        return groups_of_parts

    def plan(self, caches: Caches, sources: Sequence[Sequence[tuple[Prompt, int, int]]], fresh: Fresh) -> Plan:
        """Returns the rows that prefilled prompts enter, takes the prompts out of `fresh`, and keeps the prefill if queued rows
        need it.

        Args:
          caches: the result of the prefill.
          sources: for each part, (prompt, its index in the prefill, the number of its tokens that belong to another prompt).
          fresh: the entering rows.
        """
        plan: Plan = [[] for _ in sources]
        known = {}
        for part, prompts in enumerate(sources):
            for prompt, source, reused in prompts:
                last = len(prompt) - 1
                self.unread[part, prompt] = reused
                for index, row in fresh[part].pop(prompt, ()):
                    plan[part].append((index, source, last))
                    row.reused = self.unread.pop((part, prompt), last)
                if prompt in self.waiting:
                    known[part, prompt] = source
                else:
                    self.unread.pop((part, prompt), None)
        if known:
            self.kept.append((caches, known))
            self.forget()
        return plan

    def forget(self) -> None:
        """Drops prefills that no queued prompt needs, and the oldest beyond `KEPT`."""
        self.kept = [kept for kept in self.kept if any(prompt in self.waiting for _, prompt in kept[1])][-KEPT:]
        places = {key for _, indices in self.kept for key in indices}
        self.unread = {key: reused for key, reused in self.unread.items() if key in places}
