"""The entry point `python -m jaxalign.compare`: compares runs on one HTML page.

Exit codes: 0 done, 2 a mistake that the user can correct, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxalign.commands import run_command
from jaxalign.errors import UserError

_USAGE = """usage: python -m jaxalign.compare [--out=FILE] WORKDIR WORKDIR...

Writes one self-contained HTML page about 2 to 6 runs, finished or not: the rates of their last models with 95% intervals, the
settings and data that differ, the curves of each stage, the same prompts side by side, and times (docs/watching.md).
Differences are those from the first run.

  --out=FILE            the page; default comparison.html
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page, and returns the exit code. `argv` includes the program's name; default sys.argv."""
    return run_command(argv, _USAGE, _compare)


def _compare(argv: list[str]) -> None:
    out, workdirs = _read(argv[1:])
    # Imported here so that a mistake in the arguments is reported at once.
    from jaxalign.tracking.comparing.page import render_comparison

    for problem in render_comparison(workdirs, out):
        print(f"warning: {problem}", file=sys.stderr)
    print(f"Comparison: {out}")


def _read(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """(the page, the work directories). Raises UserError if a flag is unknown or has no value."""
    out, workdirs, waiting = "comparison.html", [], iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            workdirs.append(argument)
        elif name == "--out":
            out = value if equals else next(waiting, "")
            if not out:
                raise UserError("--out has no value; set it as --out=FILE")
        else:
            raise UserError(f"{name} is not a flag of compare; --help lists them")
    return Path(out).expanduser(), workdirs


if __name__ == "__main__":
    sys.exit(main())
