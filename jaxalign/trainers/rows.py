"""Checks the data that callers pass to trainers and converts it to records.

A data set is a list, an object with a length and an index (such as a `datasets.Dataset`) or another iterable of rows, a
mapping from column names to lists of equal length, or a pandas data frame. Every error is a `UserError` that names the
argument, the row and the accepted forms.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxalign.config.arguments import as_text
from jaxalign.config.constraints import at_least, between
from jaxalign.config.schema import checked
from jaxalign.data.chat.dialogues import (
    ANSWER_KEYS,
    Dialogue,
    asked,
    parse_demonstration,
    parse_dialogue,
    parse_judgement,
    parse_messages,
    parse_pair,
    split_answers,
    with_system,
)
from jaxalign.data.sources.base import row_fault
from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.records import Comparison, Judgement, Message, Prompt
from jaxalign.trainers.data_frames import without_frame

Example = tuple[Dialogue | None, str]
"""A prompt and the answer to imitate; or None and a text, all of whose tokens count in the loss."""
Record = Example | Comparison | Judgement | Prompt
"""What a row becomes."""

PAIR_FORM = '{"prompt": text or messages, "chosen": answer, "rejected": answer}'
_EXAMPLE_FORM = 'a string, {"prompt": text or messages, "response": answer} or {"messages": messages}'
_JUDGED_FORM = '{"prompt": text or messages, "completion": answer, "label": true or false}'
_PROMPT_FORM = 'a string, a list of {"role", "content"} that ends with a user message, or {"prompt": either, ...}'


def as_prompts(data: Any, where: str) -> list[Prompt]:
    """Prompts from texts, message lists, `Prompt` records, or rows with a "prompt" and columns for rewards.

    Args:
      data: the data set.
      where: the argument's name for error messages, such as "PPO.fit(prompts)".

    Raises:
      UserError: the data set is empty or has the wrong type, or a row is not a prompt.
    """
    return [as_prompt(row, f"{where}[{i}]", i) for i, row in enumerate(as_rows(data, where, _PROMPT_FORM))]


def as_prompt(row: Any, where: str, number: int = 0) -> Prompt:
    """One prompt. Raises UserError, which names `where`, if the row is not a prompt."""
    if isinstance(row, Prompt):
        return row
    columns = {}
    if isinstance(row, Mapping):
        if "prompt" not in row:
            raise _bad_row(row, where, _PROMPT_FORM)
        columns = {name: value for name, value in row.items() if name != "prompt"}
        wrong = next((name for name in columns if not isinstance(name, str) or name in ("prompts", "responses")), None)
        if wrong is not None:
            raise UserError(f"{where} has the column {wrong!r}; columns are passed to rewards by name, so a string other than "
                            "'prompts' and 'responses' is expected")
        row = row["prompt"]
    return Prompt(f"prompt-{number}", with_system(columns, _messages(row, where, _PROMPT_FORM)), "python", columns)


def require_equal_columns(prompts: Sequence[Prompt], where: str) -> None:
    """Raises UserError if a prompt has other columns than the first prompt."""
    names = set(prompts[0].columns)
    for number, prompt in enumerate(prompts):
        if set(prompt.columns) != names:
            differing = ", ".join(sorted(names ^ set(prompt.columns)))
            raise UserError(f"{where}[{number}] and the first prompt do not have the same columns ({differing}); give "
                            "all prompts the same columns")


def as_examples(data: Any, where: str) -> list[Example]:
    """Texts and answered prompts for supervised fine-tuning. Raises UserError like `as_prompts`."""
    rows = as_rows(data, where, _EXAMPLE_FORM)
    _warn_of_unread(rows, where)
    return [as_example(row, f"{where}[{i}]") for i, row in enumerate(rows)]


def as_pairs(data: Any, where: str) -> list[Comparison]:
    """Pairs of answers for preference learning. Raises UserError like `as_prompts`."""
    rows = as_rows(data, where, PAIR_FORM)
    _warn_of_unread(rows, where)
    pairs = [as_pair(row, f"{where}[{i}]", i) for i, row in enumerate(rows)]
    if not any(pair.weight for pair in pairs):
        raise UserError(f"{where}: every pair has the weight 0, so there is nothing to learn; give some pairs a weight above 0")
    return pairs


def as_judgements(data: Any, where: str) -> list[Judgement]:
    """Single answers with a verdict. Raises UserError like `as_prompts`."""
    rows = as_rows(data, where, _JUDGED_FORM)
    _warn_of_unread(rows, where)
    return [as_judgement(row, f"{where}[{i}]", i) for i, row in enumerate(rows)]


def compared_texts(row: Record) -> tuple[Any, ...]:
    """The texts of a row, equal for rows that were given in different forms. A label and the order of two answers do not
    count."""
    if isinstance(row, Prompt):
        messages, answers = row.messages, ()
    elif isinstance(row, Comparison):
        messages, answers = row.prompt.messages, (row.response_a, row.response_b)
    elif isinstance(row, Judgement):
        messages, answers = row.prompt.messages, (row.response,)
    else:
        messages, answers = row[0] or (), row[1:]
    return (*((message.role, message.content.strip()) for message in messages), *sorted(text.strip() for text in answers))


def is_judged(data: Any) -> bool:
    """Whether a data set consists of single judged answers instead of pairs, according to its columns or its first row."""
    if isinstance(data, Mapping):
        return "chosen" not in data and "label" in data
    first = data[0] if _is_indexed(data) and len(data) else None
    return isinstance(first, Judgement) or (isinstance(first, Mapping) and "chosen" not in first and "label" in first)


def as_rows(data: Any, where: str, form: str) -> list[Any]:
    """The rows of a data set. A mapping of columns and a data frame are converted to rows.

    Raises:
      UserError: `data` is a tensor, a text or not iterable, its columns differ in length, or it is empty.
    """
    data = _from_columns(data, where, form) if isinstance(data, Mapping) else without_frame(data)
    kind = type(data)
    if isinstance(data, (str, bytes)) or not (isinstance(data, Iterable) or _is_indexed(data)) or _is_tensor(data):
        raise UserError(f"{where} is of type {kind.__module__}.{kind.__name__}; a list of rows is expected, each {form}")
    rows = list(data) if isinstance(data, Iterable) else [data[i] for i in range(len(data))]
    if not rows:
        raise UserError(f"{where} is empty; at least one row is expected, each {form}")
    return rows


def as_answered(prompts: Any, where: str, **answers: Any) -> tuple[list[Prompt], list[list[str]]]:
    """(prompts, a list of texts for each argument in `answers`), all of equal length.

    Args:
      prompts: a data set of prompts.
      where: the function, for error messages.
      answers: texts by the name of their argument, one for each prompt.

    Raises:
      UserError: a list is empty, has an item of the wrong type, or has another length than the prompts.
    """
    asked = as_prompts(prompts, f"{where}(prompts)")
    lists = {name: as_rows(texts, f"{where}({name})", "a string") for name, texts in answers.items()}
    for name, texts in lists.items():
        lists[name] = [as_text(text, f"{where}({name})[{i}]") for i, text in enumerate(texts)]
    lengths = {"prompts": len(asked)} | {name: len(texts) for name, texts in lists.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UserError(f"{where} received lists of unequal length: {said}; give one item for each row")
    return asked, list(lists.values())


def _from_columns(columns: Mapping[str, Any], where: str, form: str) -> list[dict[str, Any]]:
    for name, values in columns.items():
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable) or _is_tensor(values):
            raise UserError(f"{where} is a mapping whose {name!r} is of type {type(values).__name__}; give a list of rows, "
                            f"each {form}, or a mapping from column names to lists")
    lists = {name: list(values) for name, values in columns.items()}
    lengths = {len(values) for values in lists.values()}
    if len(lengths) > 1:
        said = ", ".join(f"{name} has {len(values)}" for name, values in lists.items())
        raise UserError(f"the columns of {where} differ in length: {said}; give one value for each row")
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _is_indexed(data: Any) -> bool:
    """Whether the data has a length and an index from 0, such as a list; False for a text, a set or a mapping."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, (str, bytes, Mapping))


def _is_tensor(value: Any) -> bool:
    """Whether the value is a numeric array of PyTorch, JAX, NumPy or TensorFlow. The check imports none of them."""
    return hasattr(value, "dtype") and hasattr(value, "shape") and str(value.dtype) != "object"


def _messages(value: Any, where: str, form: str) -> Dialogue:
    """The messages of a prompt. Raises UserError if they do not end with a user message."""
    if isinstance(value, str):
        messages: Dialogue = (Message("user", as_text(value, where)),)
    elif _are_messages(value):
        messages = tuple(value)
    elif isinstance(value, list) and value:
        try:
            messages = parse_messages(value)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
    else:
        raise UserError(f"{where} is of type {type(value).__name__}; {form} is expected")
    for message in messages:
        as_text(message.content, f"{where}: the content of a message")
    last = messages[-1]
    if last.role != "user" or not last.content.strip():
        raise UserError(f"{where} ends with the {last.role} message {last.content[:40]!r}; a prompt must end with a non-empty "
                        "user message")
    return messages


def as_example(row: Any, where: str) -> Example:
    """One text or answered prompt. Raises UserError, which names `where`, if the row is neither, or if its answer is empty."""
    messages, answer = _example(row, where)
    if not answer.strip():
        raise UserError(f"{where} has the empty answer {answer!r}, so only the end of an answer would be learnt; remove the "
                        "row")
    return messages, answer


def _example(row: Any, where: str) -> Example:
    """`as_example` without the check of the answer."""
    if isinstance(row, str) and row.strip():
        return None, as_text(row, where)
    if isinstance(row, tuple) and len(row) == 2 and isinstance(row[1], str):
        return _messages(row[0], where, _EXAMPLE_FORM), as_text(row[1], where)
    if isinstance(row, str):
        raise UserError(f"{where} is an empty string; {_EXAMPLE_FORM} is expected")
    if not isinstance(row, Mapping):
        raise _bad_row(row, where, _EXAMPLE_FORM)
    listed = next((name for name in ("messages", "conversations") if name in row), None)
    if listed is not None:
        messages, answer = _answered(row[listed], where)
        return with_system(row, messages), answer
    key = next((name for name in ANSWER_KEYS if name in row), None)
    if key is None and isinstance(row.get("text"), str):
        return _example(row["text"], where)
    try:
        prompt = asked(row)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if key is None or prompt is None:
        raise _bad_row(row, where, _EXAMPLE_FORM)
    messages, answer = _messages(prompt, f"{where}['prompt']", _EXAMPLE_FORM), row[key]
    if isinstance(answer, list):  # Messages of the assistant, as in the conversational data sets of TRL.
        try:
            _, answer = parse_demonstration(dict(row))
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
    return with_system(row, messages), as_text(answer, f"{where}[{key!r}]")


def _answered(messages: Any, where: str) -> Example:
    """The prompt and the last answer of a whole dialogue."""
    try:
        dialogue = tuple(messages) if _are_messages(messages) else parse_dialogue(messages)
    except ValueError as error:
        raise UserError(f"{where}['messages']: {error}") from None
    if len(dialogue) < 2 or dialogue[-1].role != "assistant":
        raise UserError(f"{where}['messages'] does not end with a user message followed by an assistant message; the last "
                        "message must be the answer")
    answer = as_text(dialogue[-1].content, f"{where}: the content of the last message")
    return _messages(dialogue[:-1], where, _EXAMPLE_FORM), answer


def _are_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(item, Message) for item in value)


def as_pair(row: Any, where: str, number: int = 0) -> Comparison:
    """One pair of answers. Raises UserError, which names `where`, if the row is not a pair."""
    if isinstance(row, Comparison):
        _require_valid(row, "comparisons", where)
        return row
    if not isinstance(row, Mapping) or not {"chosen", "rejected"} <= set(row):
        raise _bad_row(row, where, PAIR_FORM)
    label, margin = _number(row, "label", where, 1.0, 0, 1), _number(row, "margin", where, None, 0, math.inf)
    weight = _number(row, "weight", where, 1.0, 0, math.inf)
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str) and prompt is not None:
        messages = with_system(row, _messages(prompt, f"{where}['prompt']", PAIR_FORM))
    else:
        try:
            answers = split_answers(*parse_pair(dict(row)))
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        if answers is None:
            raise UserError(f"{where}: its chosen and rejected dialogues have no user message in common; {PAIR_FORM} is "
                            "expected")
        messages, chosen, rejected = answers
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        as_text(answer, f"{where}[{name!r}]")
    if chosen == rejected:
        raise UserError(f"{where}: chosen and rejected are both {chosen[:40]!r}, so the pair teaches nothing; give two "
                        "different answers, or remove the row")
    return Comparison(Prompt(f"pair-{number}", messages, "python"), chosen, rejected, label, margin=margin, weight=weight)


def _require_valid(record: Comparison | Judgement, kind: str, where: str) -> None:
    """Raises UserError if a record that is given as a row is not valid. kind: as in `row_fault`."""
    fault = row_fault(record, kind, keep_empty=True)
    if fault is not None:
        raise UserError(f"{where} {fault}")


def as_judgement(row: Any, where: str, number: int = 0) -> Judgement:
    """One judged answer. Raises UserError, which names `where`, if the row is not a judged answer."""
    if isinstance(row, Judgement):
        _require_valid(row, "judgements", where)
        return row
    key = next((name for name in ANSWER_KEYS if name in row), None) if isinstance(row, Mapping) else None
    if key is None or not {"prompt", "label"} <= set(row):
        raise _bad_row(row, where, _JUDGED_FORM)
    try:
        given = {"system": row.get("system"), "prompt": row["prompt"], "completion": row[key], "label": row["label"]}
        messages, answer, desirable = parse_judgement(given)
    except ValueError as error:
        raise UserError(f"{where}: {error}; {_JUDGED_FORM} is expected") from None
    for message in messages:
        as_text(message.content, f"{where}['prompt']")
    as_text(answer, f"{where}[{key!r}]")
    return Judgement(Prompt(f"answer-{number}", messages, "python"), answer, desirable)


def _number(row: Mapping, key: str, where: str, default: float | None, low: float, high: float) -> float | None:
    """The row's value of `key`, or the default. Raises UserError if it is not a finite number in [low, high]."""
    value = row.get(key, default)
    if value is default:
        return default
    limit = at_least(low) if math.isinf(high) else between(low, high)
    return checked(value, float, f"{where}[{key!r}]", limit)


def _warn_of_unread(rows: Sequence[Any], where: str) -> None:
    """Warns, in the first process, of rows with tools, which are not read."""
    mappings = [row for row in rows if isinstance(row, Mapping)]
    unread = sum(isinstance(row.get("tools"), (str, list)) and bool(row["tools"]) for row in mappings)
    if unread and hosts.is_first():
        logging.getLogger("jaxalign").warning(f"{where}: {unread:,} of {len(rows):,} rows have 'tools', which is not read; "
                                              "chat templates are rendered without tools")


def _bad_row(row: Any, where: str, form: str) -> UserError:
    """The error for a row of the wrong type, or for a mapping with the wrong keys."""
    names = [f"{name!r} (None)" if row[name] is None else repr(name) for name in row] if isinstance(row, Mapping) else []
    keys = ", ".join(names) or "none" if isinstance(row, Mapping) else ""
    problem = f"has the keys {keys}" if keys else f"is of type {type(row).__name__}"
    return UserError(f"{where} {problem}; {form} is expected")
