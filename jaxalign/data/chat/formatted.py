"""Recognises text that somebody has already formatted with a chat template, and which would be formatted a second time."""

from __future__ import annotations

import re
from collections.abc import Iterable

_MARKERS = re.compile(
    r"<\|(?:im_start|im_end|start_header_id|end_header_id|eot_id|eom_id|begin_of_text|end_of_text|system|user|assistant|end)\|>"
    r"|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"
    r"|\A\s*(?:Human|User|Assistant):"
)
"""Markers of the templates of Qwen and OLMo (ChatML), Llama 2 and 3, Mistral, Phi, Zephyr and Gemma, and a speaker's name at
the beginning of a text."""


def is_formatted(texts: Iterable[str]) -> bool:
    """Whether one of the texts has a marker of a chat template, or begins with a speaker's name such as "Human:"."""
    return any(_MARKERS.search(text) for text in texts)
