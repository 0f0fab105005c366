"""Log-probabilities of several short texts as continuations of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxalign.feedback.speaker import Speaker

Ids = tuple[int, ...]


def text_logprobs(speaker: Speaker, prompts: Sequence[Sequence[int]], options: Sequence[Ids], end: int) -> np.ndarray:
    """The log-probability that each option's ids follow each prompt.

    If one option is a prefix of another ("1" and "10"), the shorter one must be followed by `end`. The options form a tree, and
    each inner node takes one forward pass.

    Args:
      speaker: the model with its tokenizer.
      prompts: B lists of token ids, which must leave space for the longest option.
      options: O tuples of token ids.
      end: the id that ends a text.

    Returns:
      float32 [B, O].
    """
    nodes: dict[Ids, dict[int, None]] = {}
    for option in options:
        for depth, token in enumerate(option):
            nodes.setdefault(option[:depth], {})[token] = None
    for option in options:
        if option in nodes:
            nodes[option][end] = None
    steps = {}
    for prefix, children in nodes.items():
        found = speaker.next_logprobs([[*prompt, *prefix] for prompt in prompts], np.asarray(list(children), np.int32))
        steps |= {(*prefix, token): found[:, k] for k, token in enumerate(children)}

    def total(option: Ids) -> np.ndarray:
        path = (*option, end) if option in nodes else option
        return np.sum([steps[path[: depth + 1]] for depth in range(len(path))], axis=0)

    return np.stack([total(option) for option in options], axis=1)
