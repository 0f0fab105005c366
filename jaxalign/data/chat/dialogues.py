"""Parses transcripts and message lists into turns, finds the shared context of two answers, and cuts dialogues at a turn.

A transcript is text such as "\\n\\nHuman: Hi.\\n\\nAssistant: Hello." (Bai et al. 2022, arXiv 2204.05862). A speaker's
name is a marker only at the start of a paragraph: after a blank line or at the beginning of the text. Elsewhere it is part
of a turn: "Assistant: Human: why?" is one answer that starts with the word "Human:".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxalign.errors import shown
from jaxalign.records import Message

ROLES = {"Human": "user", "Assistant": "assistant"}
SPEAKERS = {role: name for name, role in ROLES.items()}
ANSWER_KEYS = ("response", "completion", "answer", "output")
"""Names of the field of an answer, by priority."""
_SENDERS = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
"""The role of each sender in rows of ShareGPT."""
_MARKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")

Dialogue = tuple[Message, ...]


class Answers(NamedTuple):
    """Two answers and their shared context, which ends with a user's message."""

    context: Dialogue
    chosen: str
    rejected: str


def parse_transcript(text: str) -> Dialogue:
    """The messages of a transcript, with whitespace stripped. Consecutive turns of one speaker stay separate.

    Raises:
      ValueError: the text does not begin with a marker.
    """
    markers = list(_MARKER.finditer(text))
    if not markers or markers[0].start() > 0:
        raise ValueError(f"the transcript begins with {text[:20]!r}; 'Human:' or 'Assistant:' is expected")
    ends = [marker.start() for marker in markers[1:]] + [len(text)]
    return tuple(
        Message(ROLES[marker[1]], text[marker.end() : end].strip()) for marker, end in zip(markers, ends, strict=True)
    )


def is_transcript(text: str) -> bool:
    """Whether a text is a transcript and not a single turn: it begins with "\\n\\nHuman:", or with "Human:" and has an
    assistant's marker."""
    return text.startswith("\n\nHuman:") or (text.lstrip().startswith("Human:") and "\n\nAssistant:" in text)


def parse_messages(value: list[Any]) -> Dialogue:
    """The messages of a list of {"role": "user" | "assistant", "content": text}, with unchanged text.

    The first message may also have the role "system". {"from": "human" | "gpt", "value": text}, as in ShareGPT, is also read,
    and so is a content of parts {"type": "text", "text": text}, which are joined.

    Raises:
      ValueError: an item is malformed.
    """
    messages = []
    for index, item in enumerate(value, start=1):
        role, content = (item.get("role"), item.get("content")) if isinstance(item, dict) else (None, None)
        if isinstance(item, dict) and "from" in item and "role" not in item:
            role, content = _SENDERS.get(str(item["from"])), item.get("value")
        if isinstance(item, dict) and item.get("tool_calls"):
            raise ValueError(f"message {index} has tool_calls, which no stage can train on")
        content = _joined_parts(content)
        allowed = role in tuple(SPEAKERS) or (index == 1 and role == "system")
        if not allowed or not isinstance(content, str):
            roles = "'user', 'assistant' or 'system'" if index == 1 else "'user' or 'assistant'"
            raise ValueError(f"message {index} is {shown(str(item)[:60])}; {{'role': {roles}, 'content': text}} is expected")
        messages.append(Message(role, content))
    return tuple(messages)


def _joined_parts(content: Any) -> Any:
    """The text of a content that is a list of text parts; any other content unchanged."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    whole = parts and len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if whole else content


def parse_dialogue(value: Any) -> Dialogue:
    """The messages of a transcript or message list. Raises ValueError for anything else."""
    if isinstance(value, str):
        return parse_transcript(value)
    if isinstance(value, list):
        return parse_messages(value)
    raise ValueError(f"type {type(value).__name__}; a transcript or a list of messages is expected")


def parse_pair(row: dict[str, Any]) -> tuple[Dialogue, Dialogue]:
    """The two whole dialogues of a row with `chosen`, `rejected` and optionally a prompt (`asked`).

    Without `prompt`, both are whole dialogues. With it, each may also be just the answer: text that does not begin with
    a user's marker, or messages that do not begin with a user's or a system message.

    Raises:
      ValueError: a key is missing or malformed, or a dialogue does not end with the assistant's turn.
    """
    pair = []
    for key in ("chosen", "rejected"):
        if key not in row:
            raise ValueError(f"the key {key!r} is missing")
        try:
            dialogue = with_system(row, _complete(asked(row), row[key]))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        if not dialogue or dialogue[-1].role != "assistant":
            raise ValueError(f"{key}: the dialogue does not end with the assistant's turn")
        pair.append(dialogue)
    return pair[0], pair[1]


def parse_judgement(row: dict[str, Any]) -> tuple[Dialogue, str, bool]:
    """(context, answer, whether the answer is good) of a row with `prompt`, `completion` and `label`.

    The prompt is text (a single user's turn, or a transcript) or messages, and ends with the user's turn. The completion is
    text, or messages that begin and end with the assistant's. Several completion messages are joined into a transcript.

    Raises:
      ValueError: a key is missing or malformed.
    """
    for key in ("prompt", "completion", "label"):
        if key not in row:
            raise ValueError(f"the key {key!r} is missing")
    good = _is_good(row["label"])
    context, answer = _answered(row["prompt"], row["completion"])
    return with_system(row, context), answer, good


def _is_good(label: Any) -> bool:
    """Whether a label, also one of a table with numbers, says that the answer is good.

    Raises:
      ValueError: it is neither true or false nor 1 or 0.
    """
    value = label.item() if getattr(label, "ndim", None) == 0 else label  # A numpy scalar.
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise ValueError(f"label is {str(value)[:20]!r}; true or false, or 1 or 0, is expected")
    return bool(value)


def parse_demonstration(row: dict[str, Any]) -> tuple[Dialogue, str]:
    """(context, answer) of a row with `messages` (or `conversations`), which end with the answer, or with a prompt (`asked`)
    and one of `ANSWER_KEYS`.

    Prompt and answer are as in `parse_judgement`.

    Raises:
      ValueError: a key is missing or malformed.
    """
    listed = next((name for name in ("messages", "conversations") if name in row), None)
    if listed is not None:
        try:
            dialogue = parse_dialogue(row[listed])
        except ValueError as error:
            raise ValueError(f"{listed}: {error}") from error
        if [message.role for message in dialogue[-2:]] != ["user", "assistant"]:
            raise ValueError(f"{listed}: they do not end with a user's message and the assistant's answer")
        return with_system(row, dialogue[:-1]), dialogue[-1].content
    key, prompt = next((name for name in ANSWER_KEYS if name in row), None), asked(row)
    if key is None or prompt is None:
        raise ValueError('there is neither "messages" nor "prompt" with "response"')
    context, answer = _answered(prompt, row[key])
    return with_system(row, context), answer


def with_system(row: Mapping[str, Any], dialogue: Dialogue) -> Dialogue:
    """The dialogue of a row, after the text in its field "system" if it has one and the dialogue has no system message."""
    system = row.get("system")
    if not isinstance(system, str) or not system.strip() or dialogue[:1] and dialogue[0].role == "system":
        return dialogue
    return (Message("system", system), *dialogue)


def asked(row: dict[str, Any]) -> Any:
    """The prompt of an answered row: "prompt", "messages", "question", or "instruction" and "input" joined by a blank line as
    in Alpaca; None if it has none. `with_system` adds the row's system message.

    Raises:
      ValueError: an instruction or its input is not text.
    """
    for name in ("prompt", "messages"):
        if row.get(name) is not None:
            return row[name]
    name = "question" if row.get("question") is not None else "instruction"
    if row.get(name) is None:
        return None
    parts = [row[name], *([row["input"]] if name == "instruction" and row.get("input") is not None else [])]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{name} and input must be strings" if len(parts) > 1 else f"{name} must be a string")
    return [{"role": "user", "content": "\n\n".join(part for part in parts if part.strip())}]


def _answered(prompt: Any, completion: Any) -> tuple[Dialogue, str]:
    """The dialogue of a prompt, and the text of its completion."""
    try:
        context = _context(prompt)
    except ValueError as error:
        raise ValueError(f"prompt: {error}") from error
    if not context or context[-1].role != "user":
        raise ValueError("the prompt does not end with the user's turn")
    if isinstance(completion, str):
        return context, completion.strip()
    if not isinstance(completion, list):
        raise ValueError(f"completion: type {type(completion).__name__}; text or a list of messages is expected")
    try:
        turns = parse_messages(completion)
    except ValueError as error:
        raise ValueError(f"completion: {error}") from error
    if not turns or turns[0].role != "assistant" or turns[-1].role != "assistant":
        raise ValueError("the completion does not begin and end with the assistant's turn")
    return context, _join(turns)


def _complete(prompt: Any, answer: Any) -> Dialogue:
    if prompt is None:
        return parse_dialogue(answer)
    if isinstance(answer, str):
        if is_transcript(answer):
            return parse_transcript(answer)
        return (*_context(prompt), Message("assistant", answer.strip()))
    dialogue = parse_dialogue(answer)
    if not dialogue or dialogue[0].role not in ("user", "system"):
        return (*_context(prompt), *dialogue)
    if isinstance(prompt, str):
        return dialogue
    context = _context(prompt)
    asked = _without_system(context)
    if _without_system(dialogue)[: len(asked)] != asked:
        raise ValueError("it is a whole dialogue, but does not begin with the messages of the prompt")
    return dialogue if dialogue[0].role == "system" or context[0].role != "system" else (context[0], *dialogue)


def _without_system(dialogue: Dialogue) -> list[tuple[str, str]]:
    """The roles and the texts, without white space around them, of the turns."""
    return [(message.role, message.content.strip()) for message in dialogue if message.role != "system"]


def _context(prompt: Any) -> Dialogue:
    if not isinstance(prompt, str):
        return parse_dialogue(prompt)
    if not is_transcript(prompt):
        return (Message("user", prompt),)
    context = parse_transcript(prompt)
    opened = context[-1] == Message("assistant", "")  # The common form "...\n\nAssistant:"; the answer continues it.
    return context[:-1] if opened else context


def split_answers(chosen: Dialogue, rejected: Dialogue) -> Answers | None:
    """The longest shared context that ends with a user's turn and is followed by the assistant in both; None if there is none.

    If several turns follow the context (the contexts differ, or the assistant spoke twice), the answer is their transcript
    without the first marker.
    """
    limit = min(len(chosen), len(rejected)) - 1
    shared = 0
    while shared < limit and chosen[shared] == rejected[shared]:
        shared += 1
    for end in range(shared, 0, -1):
        if chosen[end - 1].role == "user" and chosen[end].role == rejected[end].role == "assistant":
            return Answers(chosen[:end], _join(chosen[end:]), _join(rejected[end:]))
    return None


def _join(turns: Dialogue) -> str:
    return turns[0].content + "".join(f"\n\n{SPEAKERS[turn.role]}: {turn.content}" for turn in turns[1:])


def cut_front(context: Dialogue, fits: Callable[[Dialogue], bool]) -> Dialogue | None:
    """The longest suffix of `context` that fits and is the whole context or starts with a user's turn; None if none fits.

    A system message at the beginning is kept in front of the suffix. If a suffix does not fit, no longer one does: shorter
    suffixes are tried first, so that the time does not grow with the square of the dialogue's length.
    """
    system = context[:1] if context and context[0].role == "system" else ()
    turns, longest = context[len(system) :], None
    if turns and fits(context):
        return context
    for start in range(len(turns) - 1, 0, -1):
        if turns[start].role == "user":
            part = (*system, *turns[start:])
            if not fits(part):
                break
            longest = part
    return longest


def cut_to_fit(
    context: Dialogue, answers: Sequence[str], count_tokens: Callable[[Dialogue, str], int] | None, max_tokens: int | None
) -> Dialogue | None:
    """`cut_front` of a context that must fit with each of several answers.

    Args:
      context: the dialogue before the answers.
      answers: at least one answer.
      count_tokens: counts the tokens of a context with an answer.
      max_tokens: the maximum of `count_tokens`; None: the whole context fits.
    """
    if count_tokens is None or max_tokens is None:
        return context
    return cut_front(context, lambda part: max(count_tokens(part, answer) for answer in answers) <= max_tokens)


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
