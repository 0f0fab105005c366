"""The probabilities of the options of an answer: of each option, all spellings that count as it, and of no option.

A judge's first token often disagrees with the answer that it writes (arXiv 2402.14499), so the probability outside of the
options is part of the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxalign.errors import UserError
from jaxalign.feedback.text_generator import TextGenerator

Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an answer in a tokenizer.

    Attributes:
      names: the O options as text.
      ids: for each option, the token ids of each of its spellings.
      end: the id that must follow an option which is the beginning of another one; None: any id that does not continue it.
    """

    names: tuple[str, ...]
    ids: tuple[tuple[Ids, ...], ...]
    end: int | None = None

    @property
    def longest(self) -> int:
        """The length of the longest spelling, in tokens."""
        return max(len(ids) for spellings in self.ids for ids in spellings)


def make_options(
    names: Sequence[str], spellings: Callable[[str], Sequence[str]], encode: Callable[[str], Sequence[int]], where: str,
    end: int | None = None,
) -> Options:
    """The options `names`.

    Args:
      names: the options as text.
      spellings: the strings that count as an option.
      encode: the ids of a string at the place of the answer.
      where: the template set and the tokenizer, for error messages.
      end: see `Options`.

    Raises:
      UserError: an option has no tokens, or two options have the same tokens.
    """
    ids, owner = [], {}
    for name in names:
        distinct = dict.fromkeys(tuple(encode(text)) for text in spellings(name))
        for spelling in distinct:
            if not spelling:
                raise UserError(f"the option {name!r} of {where} has no tokens; write the options of form.json differently")
            if owner.setdefault(spelling, name) != name:
                raise UserError(f"the options {owner[spelling]!r} and {name!r} of {where} have the same tokens, so a verdict "
                                "cannot be read; write the options of form.json differently")
        ids.append(tuple(distinct))
    return Options(tuple(names), tuple(ids), end)


def option_logprobs(generator: TextGenerator, prompts: Sequence[Sequence[int]], options: Options) -> np.ndarray:
    """The log-probability of each option right after each prompt.

    An option's spellings are summed. The tokens of all spellings form a tree, and each inner node takes one forward pass. A
    spelling that is the beginning of another one counts only if the other does not follow.

    Args:
      generator: the model with its tokenizer.
      prompts: B lists of token ids, which leave space for the longest spelling.
      options: the O options.

    Returns:
      float32 [B, O]; NaN in a row whose logits are not finite.
    """
    spellings = [ids for own in options.ids for ids in own]
    nodes: dict[Ids, dict[int, None]] = {}
    for ids in spellings:
        for depth, token in enumerate(ids):
            nodes.setdefault(ids[:depth], {})[token] = None
    inner = [ids for ids in spellings if ids in nodes]
    if options.end is not None:
        for ids in inner:
            nodes[ids][options.end] = None
    steps = {}
    for prefix, children in nodes.items():
        logprobs = generator.next_logprobs([[*prompt, *prefix] for prompt in prompts], np.asarray(list(children), np.int32))
        steps |= {(*prefix, token): logprobs[:, k] for k, token in enumerate(children)}

    def total(ids: Ids) -> np.ndarray:
        path = (*ids, options.end) if ids in nodes and options.end is not None else ids
        value = np.sum([steps[path[: depth + 1]] for depth in range(len(path))], axis=0)
        if ids not in nodes or options.end is not None:
            return value
        longer = np.sum([np.exp(steps[(*ids, token)]) for token in nodes[ids]], axis=0)
        return value + np.log1p(-np.minimum(longer, 1 - np.float32(1e-7)))

    with np.errstate(invalid="ignore"):  # NaN stays NaN.
        return np.stack([np.logaddexp.reduce([total(ids) for ids in own], axis=0) for own in options.ids], axis=1)


def outside_mass(logprobs: np.ndarray) -> np.ndarray:
    """float32 [B]: the probability of no option, from float32 [B, O]; NaN where the log-probabilities are not finite."""
    return np.maximum(0, 1 - np.sum(np.exp(logprobs.astype(np.float64)), axis=1)).astype(np.float32)
