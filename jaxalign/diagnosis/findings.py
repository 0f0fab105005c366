"""The record of one finding of `jaxalign doctor` or `jaxalign init`."""

from __future__ import annotations

from typing import Literal, NamedTuple

Status = Literal["ok", "note", "problem"]
_MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


class Finding(NamedTuple):
    """One result.

    Attributes:
      topic: the thing that was examined, such as "disk".
      status: "ok"; "note", for a setting that could be better; or "problem", for something that a run needs.
      text: the measured values and, unless the status is "ok", the remedy.
    """

    topic: str
    status: Status
    text: str

    def line(self) -> str:
        """The finding as a line for the terminal."""
        return f"{_MARKS[self.status]} {self.topic}: {self.text}"
