"""The entry point `python -m jaxalign.preview`: the tokens that a model or a judge sees, marked by whether the model learns
from them.

Exit codes: 0 done, 2 a mistake that the user can correct (one sentence on stderr, no traceback).
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jaxalign import train
from jaxalign.commands import run_command
from jaxalign.data.chat.encoding import encode_dialogue
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.data.sources.jsonl import read_bytes
from jaxalign.data.sources.rows import is_table
from jaxalign.data.sources.sequence import read_rows
from jaxalign.data.tokenizers.load import Tokenizer, load_tokenizer
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json
from jaxalign.records import Message
from jaxalign.stages.shared import preview
from jaxalign.stages.shared.base import StageContext
from jaxalign.tracking.tokens import GIVEN, LEARNT, TokenRow, legend, show

_USAGE = """usage: python -m jaxalign.preview --config=FILE [--stage=STAGE] [--config.FIELD=VALUE ...] [--workdir=DIR]
       python -m jaxalign.preview --model=DIR --messages=FILE [--answers=last|all]

Prints the tokens that the model sees, as the stage's own code encodes them.

  --config=FILE         a config file as for jaxalign.train, with any --config.FIELD=VALUE
  --stage=STAGE         revise, sft, compare, preference, dpo, ppo or rate; default: the first of them in config.stages.
                        revise and compare also show the requests to the judge, and rate those of reward.source=ai_feedback
  --workdir=DIR         the run whose stages wrote the tokenizer and the data; default runs/<name of FILE>
  --model=DIR           a folder with a tokenizer and a chat template
  --messages=FILE       dialogues: JSON (a list of {"role", "content"}, or an object with "messages"), one of these per line, or
                        a Parquet or Arrow file, a folder or a TFDS data set with a column "messages"
  --answers=last|all    mark the last answer of a dialogue, as training does (default), or every answer
  --rows=N              number of rows; default 3
  --ids                 one token per line, with its position and id
  --color=auto|always|never
"""
_CHOICES = {"answers": ("last", "all"), "color": ("auto", "always", "never")}
_OWN = ("stage", "rows", "model", "messages", "answers", "color")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the preview and returns the exit code. `argv` includes the program's name; default sys.argv."""
    return run_command(argv, _USAGE, _preview)


def _preview(argv: list[str]) -> None:
    own, rest = _take_own(argv[1:])
    if own["model"] or own["messages"]:
        (tokenizer, rows), data = _dialogues(own, rest), []
    else:
        tokenizer, rows, data = _of_stage(own, [argv[0], *rest])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # For terminals that cannot show every character.
    color = own["color"] == "always" or (own["color"] == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    ends = [f"bos {_named(tokenizer, tokenizer.bos_id)}", f"eos {_named(tokenizer, tokenizer.eos_id)}",
            f"pad {_named(tokenizer, tokenizer.pad_id)}"]
    for line in data:
        print(line)
    print(f"tokenizer: {tokenizer.vocab_size} ids, {', '.join(ends)}")
    print(legend(color))
    for row in rows:
        print()
        print(show(row, tokenizer, color, own["ids"]))


def _named(tokenizer: Tokenizer, token: int | None) -> str:
    return "none" if token is None else f"{tokenizer.piece(token)} ({token})"


def _take_own(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """This command's flags, and the remaining arguments, which `train` parses.

    Raises:
        UserError: a flag has no value, or an invalid one.
    """
    options, rest = train.take_options(arguments, _OWN, switches=("ids",))
    own: dict[str, Any] = dict.fromkeys(_OWN, "") | {"rows": "3", "answers": "last", "color": "auto", "ids": False} | options
    for name, choices in _CHOICES.items():
        if own[name] and own[name] not in choices:
            near = get_close_matches(own[name], choices, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"--{name} is {own[name]!r}; it must be one of {', '.join(choices)}{hint}")
    if not own["rows"].isdecimal() or not int(own["rows"]):
        raise UserError(f"--rows is {own['rows']!r}; a number of at least 1 is expected")
    return own | {"rows": int(own["rows"])}, rest


def _of_stage(own: dict[str, Any], argv: list[str]) -> tuple[Tokenizer, list[TokenRow], list[str]]:
    """(the tokenizer, the rows of a stage, lines on the data files)."""
    if own["answers"] == "all":
        raise UserError("--answers needs --messages; a stage's config determines which tokens it learns from")
    config, workdir, _ = train.read_arguments(argv)
    config = resolve_auto(config)
    stage = preview.choose_stage(config, own["stage"])
    return *preview.rows(StageContext(config, workdir, workdir / stage, False), stage, own["rows"]), preview.data_lines(config)


def _dialogues(own: dict[str, Any], rest: list[str]) -> tuple[Tokenizer, list[TokenRow]]:
    if not own["model"] or not own["messages"]:
        missing = "model" if not own["model"] else "messages"
        raise UserError(f"--{missing} is not given; give both --model=DIR and --messages=FILE")
    if rest or own["stage"]:
        raise UserError(f"{rest[0] if rest else '--stage'} cannot be used with --model and --messages; give those two, or "
                        "a --config")
    tokenizer = load_tokenizer(own["model"])
    rows = []
    for number, messages in enumerate(read_dialogues(Path(own["messages"]).expanduser())[: own["rows"]], start=1):
        if own["answers"] == "last":
            rows.append(preview.dialogue_row(tokenizer, messages, f"dialogue {number}"))
        else:
            ids, said = encode_dialogue(tokenizer, messages)
            rows.append(TokenRow(f"dialogue {number}", ids, "".join(LEARNT if mine else GIVEN for mine in said)))
    return tokenizer, rows


def read_dialogues(path: Path) -> list[list[Message]]:
    """The dialogues of a JSON or JSONL file or of a table, with any roles.

    Raises:
        UserError: the file cannot be read, or contains no dialogues.
    """
    try:
        table = read_rows(path) if is_table(path) else None
        text = "" if table else read_bytes(path).decode("utf-8")
    except ValueError as error:
        raise UserError(f"--messages={path} cannot be read ({error})") from None
    try:
        try:
            found = list(table) if table else [parse_json(text)]
        except json.JSONDecodeError:
            found = [parse_json(line) for line in text.split("\n") if line.strip()]
        dialogues = [[Message(m["role"], m["content"]) for m in _messages(item)] for item in found]
        if not dialogues or not all(isinstance(m.content, str) for messages in dialogues for m in messages):
            raise ValueError("there is no dialogue, or the content of a message is not a string")
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f'--messages={path} contains no dialogues ({type(error).__name__}: {error}); a JSON list of {{"role", '
                        '"content"}, an object with such a list as "messages", or one of these per line is expected') from None
    return dialogues


def _messages(item: Any) -> list:
    found = item["messages"] if isinstance(item, dict) else item
    if not isinstance(found, list) or not found:
        raise ValueError("a list of messages is expected")
    return found


if __name__ == "__main__":
    sys.exit(main())
