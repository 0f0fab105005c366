"""The entry point `python -m jaxalign.compare`: compares runs on one HTML page.

Exit codes: 0 done, 2 a mistake that the user can correct, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxalign.errors import UserError, print_error

_USAGE = """usage: python -m jaxalign.compare [--out=FILE] WORKDIR WORKDIR...

Writes one self-contained HTML page about 2 to 6 runs, finished or not: the rates of their last models with 95% intervals, the
settings and data that differ, the curves of each stage, the same prompts side by side, and times (docs/watching.md).
Differences are those from the first run.

  --out=FILE            the page; default comparison.html
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page, and returns the exit code. `argv` includes the program's name; default sys.argv."""
    arguments = list(sys.argv if argv is None else argv)[1:]
    if any(argument in ("-h", "--help", "-help") for argument in arguments):
        print(_USAGE, end="")
        return 0
    try:
        out, workdirs = _read(arguments)
        # Imported here so that a mistake in the arguments is reported at once.
        from jaxalign.tracking.comparing.page import render_comparison

        for problem in render_comparison(workdirs, out):
            print(f"warning: {problem}", file=sys.stderr)
        print(f"Comparison: {out}")
        return 0
    except UserError as error:
        return print_error(str(error), 2)
    except KeyboardInterrupt:
        return print_error("interrupted", 130)


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
