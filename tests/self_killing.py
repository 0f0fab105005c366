"""A run of stages in a process that kills itself, as the system does: with SIGKILL, and soon after a file has enough lines."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
from typing import Any

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.tracking.progress import Progress


def run_until_killed(values: dict[str, Any], workdir: pathlib.Path, file: str, lines: int) -> None:
    """Run the config `values` in another process. At the end of the first step after which `file`, a path in the work
    directory, has at least `lines` lines, the process kills itself."""
    from tests import processes

    given = json.dumps([values, str(workdir), file, lines])
    (ended,) = processes.run(1, ["-c", f"from {__name__} import program; program()", given])
    assert ended.code == -signal.SIGKILL, ended.err[-3000:]


def program() -> None:
    """The program of the other process."""
    values, workdir, file, lines = json.loads(sys.argv[1])
    path, update = pathlib.Path(workdir) / file, Progress.update

    def killed(self, *given, **named):
        update(self, *given, **named)
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            os.kill(os.getpid(), signal.SIGKILL)

    Progress.update = killed
    pipeline.run(from_config_dict(values), workdir)
