"""What goes on beside the stages of a run, for those who watch it: system metrics, the live report, stalls and the webhook.

Nothing here can stop a run, and no stage depends on it. All of it belongs to process 0.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from jaxalign import interrupts
from jaxalign.config import Config
from jaxalign.endpoint.redaction import redact_secrets
from jaxalign.errors import UserError, run_error, shown
from jaxalign.parallel import distributed, hosts
from jaxalign.stages.shared.manifest import DONE, find_manifest
from jaxalign.storage import Storage
from jaxalign.tracking.alerts import stalled
from jaxalign.tracking.system import FAILED, FINISHED, INTERRUPTED, SystemLog
from jaxalign.tracking.watching.run import step_times
from jaxalign.tracking.webhook import Webhook, announce, posted_to

_REPORT = "report"
_SIGNALLED = (130, 143)  # Exit codes of a process that SIGINT or SIGTERM has ended.
_ROWS = 40  # Rows of system metrics from which the time of a step is computed.

MOST_SHARE = 0.01
"""The share of the wall-clock time that the work may take. After a call that took t seconds, no other begins for
t / MOST_SHARE seconds, however short the interval is."""

_FIRST_SECONDS = 0.3  # The assumed duration of the first call.
_JOIN_SECONDS = 5.0  # The longest time that the end of the body waits for a call that has begun.


class Repeating:
    """Calls a function every few seconds, in a thread of its own, while the body of the `with` statement runs.

    A function that raises is called no more, after one warning.

    Args:
      name: the name of the thread and the subject of the warning, such as "the live report".
      seconds: the interval.
      action: the function.
    """

    def __init__(self, name: str, seconds: float, action: Callable[[], object]):
        self._name, self._seconds, self._action = name, seconds, action
        self._changed, self._stopped, self._soon = threading.Condition(), False, False
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._repeat,), name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread; waits at most `_JOIN_SECONDS` for a call that has begun."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(_JOIN_SECONDS)

    def soon(self) -> None:
        """Makes the next call as early as `MOST_SHARE` allows."""
        with self._changed:
            self._soon = True
            self._changed.notify()

    @property
    def ended(self) -> bool:
        """Whether no call is running and none will follow."""
        return not self._thread.is_alive()

    def _repeat(self) -> None:
        spent = _FIRST_SECONDS
        while self._wait(time.monotonic(), spent / MOST_SHARE):
            began = time.monotonic()
            try:
                self._action()
            except Exception as error:
                logging.getLogger("jaxalign").warning(
                    f"{self._name} stops ({type(error).__name__}: {error}); the run goes on without it")
                return
            spent = time.monotonic() - began

    def _wait(self, since: float, least: float) -> bool:
        """Waits for the interval, or for `least` seconds after a call of `soon`. Returns False at the end of the body."""
        with self._changed:
            while not self._stopped:
                pause = since + (least if self._soon else max(self._seconds, least)) - time.monotonic()
                if pause <= 0:
                    break
                self._changed.wait(pause)
            self._soon = False
            return not self._stopped


class Companions:
    """The companions of one run. The pipeline calls `begin` when a stage starts to compute."""

    def __init__(self, config: Config, storage: Storage, stack: contextlib.ExitStack):
        self._config, self._storage, self._stack = config, storage, stack
        self._run, self._stage = storage.path().resolve().name, ""
        self._log: SystemLog | None = None
        self._webhook: Webhook | None = None
        self._report: _LiveReport | None = None

    def begin(self, title: str) -> None:
        """Names the stage that computes from now on. The first call starts the threads."""
        if not hosts.is_first():
            return
        if self._log is None:
            self._log = self._start(title)
        self._stage = self._log.stage = title
        if self._report is not None:
            self._report.begin(title)

    def _start(self, title: str) -> SystemLog:
        tracking, workdir, enter = self._config.tracking, self._storage.path(), self._stack.enter_context
        if tracking.webhook:
            self._webhook = enter(Webhook(tracking.webhook))
            enter(posted_to(self._post))
        log = SystemLog(workdir)
        log.begin(title)
        enter(interrupts.before_end(lambda code, reason: log.end(INTERRUPTED)))
        enter(hosts.before_end(self._end_with_others))
        if tracking.system_seconds:
            enter(Repeating("the log of system metrics", tracking.system_seconds, _Beat(log)))
        report = find_manifest(self._storage, _REPORT)
        if _REPORT in self._config.stages and (report is None or report.status != DONE):
            self._report = enter(_LiveReport(workdir, self._config))
        return log

    def _post(self, content: Mapping[str, Any]) -> None:
        self._webhook.post({"run": self._run, **content})

    def end(self, event: str, error: str = "") -> None:
        """Records and posts the end of the run, if a stage has begun in this process."""
        if self._log is None:
            return
        self._log.end(event, error)
        if self._webhook is not None:
            text = f"The run {self._run} {'was ' * (event == INTERRUPTED)}{event}{': ' * bool(error)}{error}"
            self._post({"event": event, "stage": self._stage, "text": text})

    def _end_with_others(self, code: int, sentence: str) -> None:
        """Records and posts the end of the run because another process has ended, and writes the last page. Waits some seconds
        for both."""
        self.end(INTERRUPTED if code in _SIGNALLED else FAILED, shown(redact_secrets(sentence.split("\n")[0])))
        if self._report is not None:
            self._report.__exit__()
        if self._webhook is not None:
            self._webhook.finish()


class _Beat:
    """Writes a row of system metrics, and announces a stall, once for each stage."""

    def __init__(self, log: SystemLog):
        self._log, self._announced = log, set()
        self._rows: collections.deque[dict[str, Any]] = collections.deque(maxlen=_ROWS)

    def __call__(self) -> None:
        row = self._log.write()
        if self._rows and self._rows[-1]["stage"] != row["stage"]:
            self._rows.clear()
        self._rows.append(row)
        step_seconds, moved = step_times(list(self._rows))
        alert = stalled(row["time"] - moved, step_seconds)
        if alert is not None and row["stage"] not in self._announced:
            self._announced.add(row["stage"])
            announce(row["stage"], alert)


class _LiveReport:
    """Writes report.html again and again while stages compute, unless `config.tracking.live_report_seconds` is 0. After a run
    that did not reach stage report, the page is written once more, without the refresh."""

    def __init__(self, workdir: Path, config: Config):
        self._workdir, self._seconds, self._examples = workdir, config.tracking.live_report_seconds, config.evaluate.examples
        self._lock, self._stage = threading.Lock(), ""
        self._thread = Repeating("the live report", self._seconds, self._write)

    def __enter__(self) -> Self:
        if self._seconds:
            self._thread.__enter__()
        return self

    def begin(self, stage: str) -> None:
        """Stage `stage` computes from now on. Before stage report, waits for a page that is being written: stage report writes
        the last one."""
        with self._lock if stage == _REPORT else contextlib.nullcontext():
            self._stage = stage
        self._thread.soon()

    def _write(self) -> None:
        with self._lock:
            if self._stage == _REPORT:
                return
            with contextlib.suppress(UserError):  # Nothing is there yet, or a file is half-written: the next page has it.
                self._render(refresh=self._seconds)

    def _render(self, refresh: float | None) -> None:
        from jaxalign.tracking.report.page import render_report  # Here, because most starts of a run need no templates yet.

        render_report(self._workdir, self._examples, refresh)

    def __exit__(self, *_: object) -> None:
        if self._seconds:
            self._thread.__exit__()
        if self._stage not in ("", _REPORT) and self._thread.ended:
            try:
                with contextlib.suppress(UserError):  # The stage has written nothing.
                    self._render(refresh=None)
            except Exception as error:  # It must not replace the exception that ends the run.
                logging.getLogger("jaxalign").warning(f"report.html is not written again ({type(error).__name__}: {error})")


def _sentence(error: Exception) -> str:
    """A failure as one line: all lines of a message with a remedy, and the first line of another error."""
    message = run_error(error)
    if message is not None:
        return shown(redact_secrets(" ".join(line.strip() for line in message.split("\n"))))
    return shown(redact_secrets(f"{type(error).__name__}: {error}".split("\n")[0]))


@contextlib.contextmanager
def accompanied(config: Config, storage: Storage) -> Iterator[Companions]:
    """The companions of the body of the `with` statement, which runs the stages.

    Raises:
      UserError: `config.tracking.webhook` names a variable without a URL, before a stage begins.
    """
    if config.tracking.webhook and hosts.is_first():
        Webhook(config.tracking.webhook)  # Checks the variable.
    with contextlib.ExitStack() as stack:
        companions = Companions(config, storage, stack)
        try:
            yield companions
        except KeyboardInterrupt:
            companions.end(INTERRUPTED)
            raise
        except Exception as error:
            if not isinstance(error, UserError):
                distributed.end_with_others(error)
            companions.end(FAILED, _sentence(error))
            raise
        companions.end(FINISHED)
