"""The data source of prompts, read from files of several formats. A row becomes a Prompt or is counted with the reason why not.

The ending of a file's name determines its format: .txt, .csv, .json, or JSON Lines for any other ending. Each file may be
gzipped; then ".gz" follows the ending. `rows.open_rows` also reads tables (Parquet, Arrow, TFDS) and folders.

A row is one of:

- a string: the user's only turn;
- an object with the configured prompt field, or with "prompt": a string, a transcript, or a list of {"role", "content"};
- an object with "messages": a list of {"role", "content"}, or "conversations": a list of {"from", "value"}, as in ShareGPT;
- an object with "chosen": a transcript or list of messages, as in HH-RLHF and UltraFeedback; with "rejected", the turns that
  both share;
- an object with "question", or with "instruction" and optionally "input", as in Alpaca.

The first field in this order decides, but "chosen" with only the text of an answer comes after "question" and "instruction".
Final assistant turns are removed, so the dialogue ends with a user's turn. A system turn may come first.

The fields that are not part of the prompt, such as "answer", are its columns.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.config import Config
from jaxalign.data.chat.dialogues import (
    Dialogue,
    is_formatted,
    is_transcript,
    parse_dialogue,
    parse_messages,
    parse_pair,
    parse_transcript,
    split_answers,
    with_system,
)
from jaxalign.data.sources.base import PromptSets, SourceInputs, split_rows
from jaxalign.data.sources.files import named_files
from jaxalign.data.sources.json_items import COMMON, prompt_field
from jaxalign.data.sources.jsonl import BrokenLine, JsonRow, check_bad_share
from jaxalign.data.sources.reports import PromptReport
from jaxalign.data.sources.row_files import RowFile
from jaxalign.data.sources.rows import data_stem, open_indexed_rows, open_rows
from jaxalign.data.sources.window_rows import window_of_prompts
from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt
from jaxalign.registry.data_sources import PROMPT_FILES

RESERVED = ("prompt_id", "source", "prompts", "responses")
"""Names that columns must not have, because they are arguments of every reward."""


class PromptFile(NamedTuple):
    """The prompts of a file, in order, and the report on its rows."""

    prompts: list[Prompt]
    report: PromptReport


def read_prompts(
    path: str | Path,
    max_bad_share: float = 0.0,
    limit: int = 0,
    field: str = "prompt",
    name: str = "",
    columns: bool = True,
    renamed: Sequence[str] = (),
    window: int = 0,
    seed: int = 0,
) -> PromptFile:
    """Reads the prompts of a .jsonl, .json, .csv or .txt file, optionally .gz, or of a table, each distinct dialogue once.

    Args:
      path: the file, or any other data that `open_rows` reads. In a .txt file, each non-blank line is a prompt.
      max_bad_share: the largest accepted share of broken rows, in [0, 1].
      limit: stop after this number of prompts; 0 reads all.
      field: the name of the field that contains the prompt.
      name: the `source` of the prompts and the beginning of their ids; empty: the source "file", and ids with the file's name.
      columns: whether prompts keep the other fields of their rows, which must then be the same in all rows.
      renamed: the entries of `config.data.columns`.
      window, seed: if window is above 0, read only the rows of `window_of_prompts(rows, window, seed)`.

    Returns:
      Prompts with ids "NAME:LINE", "NAME:ITEM" for a JSON array or "NAME:ROW" for a table, and the report on the rows.

    Raises:
      UserError: the file is missing or damaged, too many rows are broken, or no prompt is left.
    """
    stem, source = name or data_stem(path), name or "file"
    prompts: dict[Dialogue, Prompt] = {}
    broken, duplicates = list[BrokenLine](), list[int]()
    names: set[str] | None = None
    count = 0
    rows, read, total = _open(path, renamed, field, window, seed)
    for row in read:
        count += 1
        if isinstance(row, BrokenLine):
            broken.append(row)
            continue
        try:
            messages, used = parse_prompt(row.value, field)
            kept = _other_fields(row.value, used, rows.columns) if columns and used else {}
            _check_columns(kept, names)
        except ValueError as error:
            broken.append(BrokenLine(row.line, str(error)))
            continue
        names = set(kept)
        if messages in prompts:
            duplicates.append(row.line)
            continue
        prompts[messages] = Prompt(f"{stem}:{row.line}", messages, source, kept)
        if limit and len(prompts) == limit:
            break
    check_bad_share(path, broken, count, max_bad_share, rows.unit, rows.place, columns=rows.first_columns)
    if not prompts:
        raise UserError(f'{path} has no prompts; give at least one, such as a row with "{field}" or another field that '
                        "docs/data_formats.md lists")
    formatted = tuple(_line(prompt) for prompt in prompts.values() if is_formatted(m.content for m in prompt.messages))
    report = PromptReport(str(path), count, len(prompts), tuple(broken), tuple(duplicates), formatted=formatted,
                          unit=rows.unit, total_rows=total)
    return PromptFile(list(prompts.values()), report)


def _open(
    path: str | Path, renamed: Sequence[str], field: str, window: int, seed: int
) -> tuple[RowFile, Iterable[JsonRow | BrokenLine], int]:
    """(the file, the rows to read, the number of all rows if a window is read, else 0). Takes arguments of `read_prompts`."""
    if not window:
        rows = open_rows(path, renamed, field)
        return rows, rows, 0
    indexed = open_indexed_rows(path, renamed, field)
    return indexed, (indexed[i] for i in window_of_prompts(indexed, window, seed)), len(indexed)


def _line(prompt: Prompt) -> int:
    """The number of the row that a prompt of `read_prompts` comes from."""
    return int(prompt.id.rpartition(":")[2])


def without(file: PromptFile, others: Sequence[Prompt], reason: str) -> PromptFile:
    """The file without the dialogues of the prompts `others`. The field `reason` of its report lists their lines."""
    excluded = {prompt.messages for prompt in others}
    kept = [prompt for prompt in file.prompts if prompt.messages not in excluded]
    lines = tuple(_line(prompt) for prompt in file.prompts if prompt.messages in excluded)
    return PromptFile(kept, dataclasses.replace(file.report, **{reason: lines}))


def prompts(inputs: SourceInputs) -> PromptSets:
    """The prompts of the files in `config.data`: red_team, helpful, rl (or train) and eval.

    Without rl, the prompts of red_team and helpful are also those of reinforcement learning. Without eval, a share of the
    distinct dialogues of red_team and helpful, or of rl if neither is given, is held out for evaluation. With window, only the
    rows of `window_of_prompts` of each file are read.

    Raises:
      UserError: a file cannot be read, or all of its prompts are evaluated and none is left to train on.
    """
    data, few = inputs.config.data, ""
    read: dict[str, PromptFile] = {}
    for name in PROMPT_FILES:
        if path := data.rl or data.train if name == "rl" else getattr(data, name):
            source, columns = "" if name == "rl" else name, name in ("rl", "eval")
            read[name] = read_prompts(
                Path(path).expanduser(), data.max_bad_share, data.limit, data.prompt_field, source, columns, data.columns,
                data.window, inputs.config.seed,
            )
    evaluated = read.pop("eval", None)
    if "red_team" in read and "helpful" in read:
        read["helpful"] = without(read["helpful"], read["red_team"].prompts, "in_red_team")
    trained = [name for name in ("red_team", "helpful") if name in read] or ["rl"]
    if evaluated is not None:
        held_out = evaluated.prompts
    else:
        files = ", ".join(read[name].report.path for name in trained)
        split = split_rows(inputs.config, interleaved([read[name].prompts for name in trained]), files)
        held_out, few = split.held_out, split.few
    read = {name: without(file, held_out, "evaluated") for name, file in read.items()}
    train = {name: file.prompts for name, file in read.items()}
    for name, file in read.items():
        if not file.prompts and (name != "helpful" or len(read) == 1):
            raise UserError(f"all {file.report.prompts} prompts of {file.report.path} are used for evaluation, so none is left "
                            "to train on; give more prompts, or other ones in config.data.eval")
    return PromptSets(
        rl=train["rl"] if "rl" in train else interleaved([train[name] for name in trained]),
        evaluate=held_out,
        red_team=train.get("red_team"),
        helpful=train.get("helpful"),
        reports=tuple(file.report for file in (*read.values(), *((evaluated,) if evaluated else ()))),
        few=few,
    )


def interleaved(parts: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """The prompts of several lists, mixed so that every prefix has them in proportion to the lists' lengths."""
    placed = [((i + 0.5) / len(part), number, prompt) for number, part in enumerate(parts) for i, prompt in enumerate(part)]
    return [prompt for _, _, prompt in sorted(placed, key=lambda item: item[:2])]


def mixed(others: Sequence[Prompt], helpful: Sequence[Prompt], share: float, count: int, field: str) -> list[Prompt]:
    """At most `count` prompts, of which the fraction `share` is helpful, mixed in proportion.

    Raises:
      UserError: there is no prompt of a kind that the share needs, or the columns of the two kinds differ.
    """
    for kind, usable, needed in (("helpful", helpful, share), ("other", others, 1 - share)):
        if needed and not usable:
            raise UserError(f"{field} is {share:g}, but no {kind} prompts are left; give more prompts, or change the share")
    if share and share < 1 and set(others[0].columns) != set(helpful[0].columns):
        missing = ", ".join(sorted(set(others[0].columns) ^ set(helpful[0].columns)))
        raise UserError(f"{field} is {share:g}, but the prompts of config.data.rl have columns that those of data.helpful lack "
                        f"({missing}); remove the columns, or leave the share at None")
    total = min([count, *([len(helpful) / share] if share else []), *([len(others) / (1 - share)] if share < 1 else [])])
    number = round(total * share)
    return interleaved([others[: max(round(total) - number, 0)], helpful[:number]])


def in_turn(prompts: Sequence[Prompt], config: Config) -> list[Prompt]:
    """Interleaves the prompts of several files in proportion to data.weights or, by default, to their numbers of prompts.

    Every prefix of the result has approximately these proportions.
    """
    if not config.data.extra_train:
        return list(prompts)
    counts = collections.Counter(prompt.source for prompt in prompts)
    shares = dict(zip(named_files(config), config.data.weights, strict=True)) if config.data.weights else counts
    seen: collections.Counter[str] = collections.Counter()
    places = []
    for prompt in prompts:
        places.append((seen[prompt.source] + 0.5) / shares[prompt.source])
        seen[prompt.source] += 1
    return [prompts[i] for i in sorted(range(len(prompts)), key=places.__getitem__)]


def _check_columns(columns: dict[str, Any], names: set[str] | None) -> None:
    """Raises ValueError for a reserved column name, or if the names differ from `names`, those of the first prompt."""
    for name in RESERVED:
        if name in columns:
            raise ValueError(f'the column "{name}" is reserved; give it another name')
    if names is not None and set(columns) != names:
        different = sorted(set(columns) ^ names)
        raise ValueError(f"the columns differ from those of the first prompt ({', '.join(different)} in only one of the two)")


class PromptRow(NamedTuple):
    """The dialogue of a row, and the names of the fields that it was read from."""

    messages: Dialogue
    fields: tuple[str, ...]


def parse_prompt(value: Any, field: str = "prompt") -> PromptRow:
    """The prompt of a row.

    Args:
        value: a string or an object.
        field: the name of the field that has the prompt, if the row has such a field.

    Raises:
        ValueError: the row has none of these layouts, or its dialogue does not end with a non-empty user turn.
    """
    name = None if isinstance(value, str) else prompt_field(value, field)
    if isinstance(value, str):
        messages, fields = (Message("user", value),), ()
    elif name is None:
        names = ", ".join(f'"{name}"' for name in dict.fromkeys((field, *COMMON[:-1])))
        raise ValueError(f'no {names} or "instruction"')
    elif name == "chosen" and name != field:
        fields = tuple(each for each in ("chosen", "rejected", "prompt") if each in value)
        messages = _shared(value)
    elif name == "instruction" and name != field:
        text, more = value[name], value.get("input") or ""
        if not isinstance(text, str) or not isinstance(more, str):
            raise ValueError('"instruction" and "input" must be strings')
        fields = ("instruction", "input") if "input" in value else ("instruction",)
        messages = (Message("user", "\n\n".join(part for part in (text, more) if part.strip())),)
    elif isinstance(value[name], list):
        messages, fields = parse_messages(value[name]), (name,)
    elif not isinstance(value[name], str):
        raise ValueError(f'"{name}" is of type {type(value[name]).__name__}; a string or a list of messages is expected')
    elif is_transcript(value[name]):
        messages, fields = parse_transcript(value[name]), (name,)
    else:
        messages, fields = (Message("user", value[name]),), (name,)
    if isinstance(value, Mapping):
        messages = with_system(value, messages)
    while messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1].role != "user" or not messages[-1].content.strip():
        raise ValueError("the prompt does not end with a non-empty user turn")
    return PromptRow(messages, fields)


def _shared(row: Mapping[str, Any]) -> Dialogue:
    """The dialogue before the answer "chosen"; with "rejected", the turns before the two answers differ."""
    if "rejected" not in row:
        return parse_dialogue(row["chosen"])
    answers = split_answers(*parse_pair(dict(row)))
    if answers is None:
        raise ValueError('"chosen" and "rejected" have no common user turn that both answer')
    return answers.context


def _other_fields(value: Mapping[str, Any], used: Sequence[str], columns: Sequence[str] | None) -> dict[str, Any]:
    """The fields that are not part of the prompt. In a table, whose rows all have `columns`, an empty cell is None."""
    return {name: value.get(name) for name in (value if columns is None else columns) if name not in used}
