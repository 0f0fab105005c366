"""Blind sheets: pairs of answers of two models of a run to the same prompts, in random order, for people to rate.

A sheet names no model. Its key, a separate file, maps the two sides of each pair to the models. A sheet is written as CSV,
as JSONL and as a page that needs only a browser.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign.errors import UserError
from jaxalign.storage import json_bytes, json_lines, write_bytes_atomically
from jaxalign.tracking.report.templating import render
from jaxalign.tracking.workdir import RunFiles, read_object

Answers = Mapping[tuple[str, str], Mapping[str, Any]]
"""The rows of stage evaluate by model and prompt."""
KEY = "key.json"
PAGE = "sheet.html"
COLUMNS = ("sheet", "id", "prompt", "answer_1", "answer_2", "rating")
"""The columns of the CSV file."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""The first characters of a cell that a spreadsheet program may take for a formula."""


@dataclasses.dataclass(frozen=True)
class PlacedPair:
    """A pair of the key: its id on the sheet, its prompt, and the models whose answers are shown first and second."""

    id: str
    prompt_id: str
    first: str
    second: str


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A sheet with its key.

    Attributes:
      models: the earlier and the later model, in the order of the evaluation.
      seed: the seed of the draw.
      pairs: the pairs, in the order of the sheet.
      shown: for each pair what a rater sees: {"id", "messages", "answer_1", "answer_2"}.
      prompts: the number of prompts that both models answered.
      equal: how many of them have two equal answers; they are never drawn.
    """

    models: tuple[str, str]
    seed: int
    pairs: tuple[PlacedPair, ...]
    shown: tuple[Mapping[str, Any], ...]
    prompts: int
    equal: int

    @property
    def hash(self) -> str:
        """Identifies the sheet; each of its rows and its key have it."""
        return sheet_hash(self.shown)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the sheet, without ratings."""
        return [{"sheet": self.hash, **pair} for pair in self.shown]

    @property
    def key(self) -> dict[str, Any]:
        """The content of the key."""
        return {"sheet": self.hash, "models": list(self.models), "seed": self.seed, "prompts": self.prompts,
                "equal": self.equal, "pairs": [dataclasses.asdict(pair) for pair in self.pairs]}


def answers_of(run: RunFiles) -> Answers:
    """The rows of stage evaluate."""
    return {(row["model"], row["prompt_id"]): row for row in run.rows("evaluate")}


def two_models(run: RunFiles, named: Sequence[str] = ()) -> tuple[str, str]:
    """The earlier and the later of two models of the evaluation.

    Args:
      run: the run.
      named: the names of both, in any order; empty for the first and the last model.

    Raises:
      UserError: the run has fewer than two evaluated models, or not exactly two of them are named.
    """
    models = run.models
    if len(models) < 2:
        raise UserError(f"{run.path} has the answers of {len(models)} evaluated models; two are expected: finish stage "
                        "evaluate of a run that trains a policy first")
    if not named:
        return models[0], models[-1]
    unknown = next((name for name in named if name not in models), None)
    if unknown is not None:
        raise UserError(f"--models names {unknown!r}, which stage evaluate has not answered with; its models are "
                        f"{', '.join(models)}")
    if len(set(named)) != 2 or len(named) != 2:
        raise UserError(f"--models is {','.join(named)!r}; two different models are expected, such as "
                        f"{models[0]},{models[-1]}")
    first, second = sorted(named, key=models.index)
    return first, second


def draw_sheet(answers: Answers, models: tuple[str, str], count: int, seed: int) -> Sheet:
    """Draws pairs of different answers, and the order of each two answers.

    The draw follows from hashes of the seed and the prompts, so the first pairs of a larger sheet are those of a smaller one.

    Args:
      answers: the rows of stage evaluate.
      models: the earlier and the later model.
      count: the number of pairs; all are drawn if there are fewer.
      seed: determines which prompts are drawn, their order, and the order of the two answers.

    Raises:
      UserError: the models have no different answers to any prompt.
    """
    prompts = [prompt_id for model, prompt_id in answers if model == models[0] and (models[1], prompt_id) in answers]
    different = [p for p in prompts if answers[models[0], p]["response"] != answers[models[1], p]["response"]]
    if not different:
        raise UserError(f"{models[0]} and {models[1]} have no different answers to the same prompt; choose other --models")
    digests = {p: hashlib.sha256(f"{seed}/{p}".encode("utf-8", "replace")).digest() for p in different}
    pairs, shown = [], []
    for prompt_id in sorted(different, key=digests.__getitem__)[:count]:
        first, second = models[:: -1 if digests[prompt_id][-1] % 2 else 1]
        texts = _shown(answers, prompt_id, first, second)
        name = f"p{_sha256([seed, prompt_id, texts])[:11]}"  # A spreadsheet would read some hexadecimal numbers as floats.
        pairs.append(PlacedPair(name, prompt_id, first, second))
        shown.append({"id": name, **texts})
    return Sheet(models, seed, tuple(pairs), tuple(shown), len(prompts), len(prompts) - len(different))


def sheet_hash(shown: Iterable[Mapping[str, Any]]) -> str:
    """The hash of what the raters see: 16 hexadecimal digits after an "s"."""
    return f"s{_sha256(list(shown))[:16]}"


def belongs(answers: Answers, sheet: str, pairs: Iterable[PlacedPair]) -> bool:
    """Whether a sheet shows answers of this run as they are now.

    Args:
      answers: the rows of stage evaluate.
      sheet: the hash of the sheet.
      pairs: its key.
    """
    pairs = list(pairs)
    if any((model, pair.prompt_id) not in answers for pair in pairs for model in (pair.first, pair.second)):
        return False
    return sheet == sheet_hash({"id": p.id, **_shown(answers, p.prompt_id, p.first, p.second)} for p in pairs)


def _shown(answers: Answers, prompt_id: str, first: str, second: str) -> dict[str, Any]:
    row = answers[first, prompt_id]
    messages = [{"role": message["role"], "content": message["content"]} for message in row["messages"]]
    return {"messages": messages, "answer_1": row["response"], "answer_2": answers[second, prompt_id]["response"]}


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True, sort_keys=True).encode()).hexdigest()


def write_sheet(sheet: Sheet, folder: Path) -> list[Path]:
    """Writes sheet.html, sheet.csv, sheet.jsonl and key.json. A file that exists is kept, since it may have ratings.

    Returns:
      The paths of the four files.

    Raises:
      UserError: the folder has files of another sheet, or cannot be written.
    """
    contents = {
        PAGE: page, "sheet.csv": csv_bytes,
        "sheet.jsonl": lambda sheet: json_lines([{**row, "rating": None} for row in sheet.rows]),
        KEY: lambda sheet: json_bytes(sheet.key),
    }
    present = [name for name in contents if (folder / name).exists()]
    if present and (KEY not in present or read_object(folder / KEY).get("sheet") != sheet.hash):
        raise UserError(f"{folder} has {present[0]} of another sheet; give another folder as --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            if name not in present:
                write_bytes_atomically(folder / name, content(sheet))
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); give another folder as --out") from None
    return [folder / name for name in contents]


def csv_bytes(sheet: Sheet) -> bytes:
    """UTF-8 with a byte order mark, by which spreadsheet programs recognise UTF-8. Text that could be taken for a formula has
    an apostrophe before it."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    for row in sheet.rows:
        messages = row["messages"]
        turns = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
        prompt = messages[0]["content"] if len(messages) == 1 else "\n\n".join(turns)
        texts = {"prompt": prompt, "answer_1": row["answer_1"], "answer_2": row["answer_2"]}
        texts = {name: f"'{text}" if text.startswith(_FORMULA) else text for name, text in texts.items()}
        writer.writerow({"sheet": row["sheet"], "id": row["id"], **texts, "rating": ""})
    return file.getvalue().replace("\0", "\ufffd").encode("utf-8-sig", "replace")


def page(sheet: Sheet) -> bytes:
    """One HTML file without external resources. Its content security policy permits only its own script, and no loading."""
    script = render("rating_sheet.js.j2")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    content = {"sheet": sheet.hash, "pairs": sheet.shown}
    return render("rating_sheet.html.j2", script=script, digest=digest, content=content).encode("utf-8", "replace")
