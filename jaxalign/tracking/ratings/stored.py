"""The ratings in a run's folder: one file for each rater and sheet, WORKDIR/ratings/RATER-SHEET.json."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxalign.errors import UserError
from jaxalign.storage import json_bytes, write_bytes_atomically
from jaxalign.tracking.ratings.reading import FIRST, SECOND, TIE, read_filled
from jaxalign.tracking.ratings.sheet import Answers, PlacedPair, belongs
from jaxalign.tracking.workdir import read_object

FOLDER = "ratings"
_NAME = re.compile(r"\w[\w .'-]{0,39}")


@dataclasses.dataclass(frozen=True)
class Rated:
    """The ratings of one person of one sheet.

    Attributes:
      rater: the name of the person.
      sheet: the hash of the sheet.
      models: the earlier and the later model.
      pairs: the pairs of the sheet.
      ratings: by the id of the pair; None for a pair without a rating.
    """

    rater: str
    sheet: str
    models: tuple[str, str]
    pairs: tuple[PlacedPair, ...]
    ratings: Mapping[str, int | None]

    @property
    def better(self) -> dict[str, str | None]:
        """The model with the better answer by prompt, None for a tie; only of rated pairs."""
        sides = {pair.prompt_id: (self.ratings[pair.id], {TIE: None, FIRST: pair.first, SECOND: pair.second})
                 for pair in self.pairs}
        return {prompt_id: models[rating] for prompt_id, (rating, models) in sides.items() if rating is not None}

    def count(self, rating: int | None) -> int:
        """The number of pairs with this rating."""
        return list(self.ratings.values()).count(rating)

    def belongs(self, answers: Answers) -> bool:
        """Whether the run still has the answers that were rated."""
        return belongs(answers, self.sheet, self.pairs)


def import_ratings(workdir: Path, answers: Answers, key: Path, filled: Path, rater: str = "") -> tuple[Rated, Path, bool]:
    """Checks a filled sheet and stores its ratings.

    Args:
      workdir: the run.
      answers: the rows of its stage evaluate.
      key: the key of the sheet.
      filled: the CSV file, the JSONL file or the file of the page.
      rater: the name of the person; empty for the name in the file of the page.

    Returns:
      The ratings, the file that has them, and whether it replaces an earlier import.

    Raises:
      UserError: a file is damaged, does not fit the others or the run, or the name is missing or has other characters.
    """
    if not key.is_file():
        raise UserError(f"{key} does not exist; give the key.json of the sheet as --key")
    sheet, models, pairs = _read_key(read_object(key), key)
    if not belongs(answers, sheet, pairs):
        raise UserError(f"{key} is the key of a sheet of another run than {workdir}, or stage evaluate has written other "
                        "answers since the export; give the run of the sheet")
    ratings, saved_name = read_filled(filled, sheet, {pair.id for pair in pairs})
    name = rater or saved_name
    if not name:
        raise UserError(f"{filled} does not name its rater; add --rater=NAME")
    if not _NAME.fullmatch(name):
        raise UserError(f"the rater's name is {name!r}; up to 40 letters, digits, spaces and .'-_ are expected: set another "
                        "one with --rater=NAME")
    rated = Rated(name, sheet, models, pairs, ratings)
    path = workdir / FOLDER / f"{name}-{sheet[1:9]}.json"
    replaces = path.exists()
    content = {"rater": name, "sheet": sheet, "models": list(models),
               "pairs": [dataclasses.asdict(pair) | {"rating": ratings[pair.id]} for pair in pairs]}
    try:
        write_bytes_atomically(path, json_bytes(content))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); free some space or restore the permissions") from None
    return rated, path, replaces


def stored_ratings(workdir: Path) -> list[Rated]:
    """All imported ratings of a run, sorted by file name. Raises UserError for a damaged file."""
    stored = []
    for path in sorted((workdir / FOLDER).glob("*.json")):
        content = read_object(path)
        sheet, models, pairs = _read_key(content, path)
        ratings = {row["id"]: row.get("rating") for row in content["pairs"]}
        valid = all(value in (None, TIE, FIRST, SECOND) for value in ratings.values())
        if not valid or not isinstance(content.get("rater"), str):
            raise _damaged(path)
        stored.append(Rated(content["rater"], sheet, models, pairs, ratings))
    return stored


def _read_key(content: Mapping[str, Any], path: Path) -> tuple[str, tuple[str, str], tuple[PlacedPair, ...]]:
    """The hash of the sheet, the models and the pairs of a key, or of the stored ratings, which have the same fields."""
    names = [field.name for field in dataclasses.fields(PlacedPair)]
    sheet, models, rows = (content.get(name) for name in ("sheet", "models", "pairs"))
    if not isinstance(sheet, str) or not isinstance(models, list) or len(models) != 2 or not isinstance(rows, list):
        raise _damaged(path)
    if not all(isinstance(row, dict) and all(isinstance(row.get(name), str) for name in names) for row in rows):
        raise _damaged(path)
    pairs = tuple(PlacedPair(*(row[name] for name in names)) for row in rows)
    if any({pair.first, pair.second} != set(models) for pair in pairs) or len({pair.id for pair in pairs}) != len(pairs):
        raise _damaged(path)
    return sheet, (models[0], models[1]), pairs


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} has another form than `jaxalign ratings` writes; restore the file, or export or import again")
