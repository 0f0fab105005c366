"""The entry point `python -m jaxalign.watch`: shows runs while they go on, or exports their numbers for Prometheus.

It only reads the files of work directories, so it can run on any machine that sees them, and touches no training process.
Exit codes: 0 done, 2 a mistake that the user can correct, 130 interrupted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxalign.commands import run_command
from jaxalign.errors import UserError
from jaxalign.tracking.watching.run import RunView

_USAGE = """usage: python -m jaxalign.watch [--once] [--every=SECONDS] WORKDIR...
       python -m jaxalign.watch --prometheus=PORT [--every=SECONDS] WORKDIR...

Shows the stage, progress, rates, losses, score, KL, memory and time left of runs, with alerts and what to do about them
(docs/watching.md). It reads only the work directories. Ctrl-C ends it.

  --once                print the table once and exit
  --every=SECONDS       the time between two readings; default 2
  --prometheus=PORT     serve the numbers at http://HOST:PORT/metrics instead of showing them; launch/grafana.json is a
                        dashboard for them
  --address=ADDRESS     with --prometheus: the address to serve at; default 127.0.0.1, this machine only
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Shows the runs, and returns the exit code. `argv` includes the program's name; default sys.argv."""
    return run_command(argv, _USAGE, _watch)


def _watch(argv: list[str]) -> int:
    options, workdirs = _read(argv[1:])
    views = [RunView(workdir) for workdir in workdirs]
    try:
        if options["prometheus"]:
            from jaxalign.tracking.watching.exporter import serve

            serve(views, options["prometheus"], options["every"], options["address"])
        else:
            _show(views, options["every"], options["once"])
    except KeyboardInterrupt:  # The usual end of this command.
        return 130
    return 0


def _show(views: Sequence[RunView], every: float, once: bool) -> None:
    """Prints the table once, or refreshes it until the user interrupts."""
    from rich.console import Console
    from rich.live import Live

    from jaxalign.tracking.watching.screen import WIDTH, render

    console = Console(highlight=False)
    if not console.is_terminal:  # A pipe or file has no width.
        console = Console(highlight=False, width=WIDTH)
    if once:
        console.print(render([view.status() for view in views], console.width))
        return
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            live.update(render([view.status() for view in views], console.width), refresh=True)
            time.sleep(every)


def _read(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(the options, the work directories).

    Raises:
      UserError: a flag is unknown or has another value than expected, or no directory is given.
    """
    options: dict[str, Any] = {"once": False, "every": 2.0, "prometheus": 0, "address": "127.0.0.1"}
    workdirs = []
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("-"):
            workdirs.append(argument)
        elif argument == "--once":
            options["once"] = True
        elif argument.startswith("--") and name in ("every", "prometheus", "address"):
            options[name] = _value(name, value if equals else next(waiting, ""))
        else:
            raise UserError(f"{argument.partition('=')[0]} is not a flag of watch; --help lists them")
    if not workdirs:
        raise UserError("no work directory is given; pass the --workdir of one or more runs, as in "
                        "`python -m jaxalign.watch runs/quickstart`")
    return options, workdirs


def _value(name: str, text: str) -> Any:
    """The value of a flag. Raises UserError if it is not one."""
    if name == "address":
        if not text:
            raise UserError("--address has no value; set it as --address=0.0.0.0 to serve to other machines")
        return text
    try:
        value = int(text) if name == "prometheus" else float(text)
    except ValueError:
        value = -1
    if name == "prometheus" and not 0 < value < 65536:
        raise UserError(f"--prometheus is {text!r}; a port between 1 and 65535 is expected, such as --prometheus=9400")
    if name == "every" and not 0.1 <= value <= 3600:
        raise UserError(f"--every is {text!r}; a number of seconds between 0.1 and 3600 is expected")
    return value


if __name__ == "__main__":
    sys.exit(main())
