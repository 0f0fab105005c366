"""Writes a sheet as CSV, as JSONL and as a page that needs only a browser, and its key beside them."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from pathlib import Path

from jaxalign.errors import UserError
from jaxalign.storage import json_bytes, json_lines, write_bytes_atomically
from jaxalign.tracking.ratings.sheet import Sheet
from jaxalign.tracking.report.templating import render
from jaxalign.tracking.workdir import read_object

KEY = "key.json"
PAGE = "sheet.html"
COLUMNS = ("sheet", "id", "prompt", "answer_1", "answer_2", "rating")
"""The columns of the CSV file."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""The first characters of a cell that a spreadsheet program may take for a formula."""


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
