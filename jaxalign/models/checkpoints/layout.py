"""Where each weight of a decoder is stored in its family's files: the layout notation of `families.base.Weight`.

"(H h) D -> D H h" means that the stored tensor is [H * h, D] and the decoder's leaf [D, H, h]. A letter that occurs only on
the left is an axis that the decoder's leaf does not have; the leaf is index `pick` along it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from jaxalign.models.families.base import Weight
from jaxalign.models.model import Model
from jaxalign.registry.families import Family

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each axis.


class CheckpointLayout:
    """One layout with its sizes.

    Args:
      text: "stored axes -> decoder's axes".
      sizes: the size of every letter.
      pick: the index of the decoder's leaf along the letter that it does not have.

    Attributes: stored_shape, decoder_shape; axes, the decoder's letters; parts, the number of the decoder's leaves in one
    stored tensor; rows, the decoder's axis along which slices of the stored tensor are contiguous.
    """

    def __init__(self, text: str, sizes: Mapping[str, int], pick: int = 0):
        left, _, right = text.partition("->")
        self._groups = [tuple(both.strip("()").split()) for both in re.findall(r"\([^)]*\)|\S+", left)]
        self._letters = [letter for group in self._groups for letter in group]
        self.axes = tuple(right.split())
        missing = [letter for letter in self._letters if letter not in self.axes]
        merged = {group[0] for group in self._groups if len(group) > 1}  # A leading part axis could not be read by rows.
        known = set(self.axes) <= set(self._letters) <= set(sizes)
        if len(missing) > 1 or merged & set(missing) or not known:
            raise ValueError(f"{text!r} is not a layout of letters in {sorted(sizes)}")
        self._sizes, self._pick = sizes, pick
        self._alone = missing[0] if missing else None
        self.stored_shape = tuple(math.prod(sizes[letter] for letter in group) for group in self._groups)
        self.decoder_shape = tuple(sizes[letter] for letter in self.axes)
        self.parts = sizes[self._alone] if self._alone else 1
        self.rows = next(self.axes.index(letter) for letter in self._letters if letter in self.axes)

    def window(self, bounds: Bounds) -> tuple[slice, ...]:
        """The smallest block of the stored tensor, one slice per axis, that contains these bounds of the decoder's leaf."""
        slices = []
        for group in self._groups:
            start, stop = self._bounds(bounds, group[0])
            inner = math.prod(self._sizes[letter] for letter in group[1:])
            slices.append(slice(start * inner, stop * inner))
        return tuple(slices)

    def to_decoder(self, block: np.ndarray, bounds: Bounds) -> np.ndarray:
        """The decoder's values within bounds, from the stored block `window(bounds)`; a view if possible."""
        shape, index = [], []
        for group in self._groups:
            for place, letter in enumerate(group):
                start, stop = self._bounds(bounds, letter)
                shape.append(stop - start if place == 0 else self._sizes[letter])
                index.append(slice(None) if place == 0 else slice(start, stop))
        if self._alone:
            at = self._letters.index(self._alone)
            index[at] = self._pick
        left = [letter for letter in self._letters if letter != self._alone]
        return block.reshape(shape)[tuple(index)].transpose([left.index(letter) for letter in self.axes])

    def to_stored(self, leaves: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        """The stored block `window(bounds)`, from the values within bounds of all `parts` leaves in the order of their pick.
        Bounds may split only the first axis of each group."""
        left = [letter for letter in self._letters if letter != self._alone]
        turned = [leaf.transpose([self.axes.index(letter) for letter in left]) for leaf in leaves]
        at = self._letters.index(self._alone) if self._alone else 0
        whole = np.stack(turned, axis=at) if self._alone else turned[0]
        return whole.reshape([window.stop - window.start for window in self.window(bounds)])

    def _bounds(self, bounds: Bounds, letter: str) -> tuple[int, int]:
        return (0, self._sizes[letter]) if letter == self._alone else bounds[self.axes.index(letter)]


@dataclasses.dataclass(frozen=True)
class Place:
    """One leaf of the parameters and where it is stored.

    stack: the sizes of the leaf's leading axes (layers, experts), along which separate tensors are stacked. The indices of the
    stored tensors are np.ndindex(stack): (), (layer,) or (layer, expert).
    start: the first index of this leaf along the stored tensor's first axis, if parts follow each other there.
    stored_shape: the shape of the whole stored tensor.
    """

    weight: Weight
    layout: CheckpointLayout
    stack: tuple[int, ...]
    start: int
    stored_shape: tuple[int, ...]

    def window(self, bounds: Bounds) -> tuple[slice, ...]:
        """The smallest block of the stored tensor, one slice per axis, that contains these bounds of the leaf."""
        first, *others = self.layout.window(bounds)
        return slice(first.start + self.start, first.stop + self.start), *others

    def name(self, number: tuple[int, ...]) -> str:
        """The stored name of the tensor with that index."""
        return self.weight.stored.format(**dict(zip(("layer", "expert"), number, strict=False)))


def places(family: Family, model: Model) -> tuple[Place, ...]:
    """All leaves of a model with the head "lm" or "scalar", without the padding of its tables.

    Raises:
      ValueError: the head is neither "lm" nor "scalar"; the Hugging Face layout has no model with both heads.
    """
    c = model.config
    weights = list(family.load("weights")(c))
    if model.head == "scalar":
        weights.append(Weight("score.weight", ("score",), "1 D -> D"))
    elif model.head != "lm":
        raise ValueError(f"head {model.head!r} does not exist in the Hugging Face layout; 'lm' or 'scalar' is expected")
    elif not c.tie_embeddings:
        weights.append(Weight(family.lm_head, ("unembedding",), "V D -> D V"))
    fused: dict[str, list[Weight]] = collections.defaultdict(list)
    for weight in sorted(weights, key=lambda weight: weight.pick):
        fused[weight.stored].append(weight)
    experts = c.experts.count if c.experts else 1
    sizes = {"D": c.embed, "H": c.heads, "K": c.kv_heads, "h": c.head_dim, "F": c.mlp, "V": c.vocab, "E": experts, "1": 1}
    leaves = []
    for weight in weights:
        stack = tuple(size for word, size in (("{layer}", c.layers), ("{expert}", experts)) if word in weight.stored)
        parts = fused[weight.stored]
        layout, *others = (
            CheckpointLayout(part.layout, sizes | {"n": len(parts)}, part.pick) for part in (weight, *parts)
        )
        start, rows = 0, layout.stored_shape[0]
        if layout.parts == 1:  # The parts follow each other.
            rows = sum(other.stored_shape[0] for other in others)
            start = sum(other.stored_shape[0] for other, part in zip(others, parts, strict=True) if part.pick < weight.pick)
        leaves.append(Place(weight, layout, stack, start, (rows, *layout.stored_shape[1:])))
    return tuple(leaves)
