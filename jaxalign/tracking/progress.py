"""Shows the progress of a stage on stderr: a bar on a terminal, otherwise a plain line every few seconds.

Only the first process prints.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import tqdm

from jaxalign.parallel import hosts
from jaxalign.tracking import formatting

_BAR_SECONDS = 0.2
_LINE_SECONDS = 5.0
_RATE_SECONDS = 30.0  # Window for speed and remaining time; limits how long compilation distorts them.
_BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}s{postfix}"

_current: Progress | None = None


def current() -> Progress | None:
    """The newest `Progress` of this process that is not closed; None between them. Another thread may call this."""
    return _current


_NOTE: contextvars.ContextVar[Callable[[], str] | None] = contextvars.ContextVar("note", default=None)


@contextlib.contextmanager
def noted(note: Callable[[], str]) -> Iterator[None]:
    """Adds a text to the lines of each `Progress` that is created in the body of the `with` statement.

    note: returns the text; called whenever a line is shown. "" adds nothing.
    """
    token = _NOTE.set(note)
    try:
        yield
    finally:
        _NOTE.reset(token)


class Progress(contextlib.AbstractContextManager):
    """Shows the progress of a stage: step, loss or reward, tokens per second, remaining time.

        with Progress("sft", total=400, start=resumed_step) as progress:
            for batch in batches:
                ...
                progress.update(tokens=batch_tokens, loss=loss)

    Values may be JAX scalars that are still being computed. They are converted only when printed, so an update does not block
    the host.

    Args:
        stage: the stage's name.
        total: the number of steps, including those before `start`.
        start: the number of steps completed by an earlier process.
        unit: the singular noun for a step.
        stream, clock: for tests; by default stderr and the monotonic clock.
    """

    def __init__(self, stage: str, total: int, start: int = 0, unit: str = "step", *,
                 stream: Any = None, clock: Callable[[], float] = time.monotonic):
        self.stage, self.total, self.unit, self.count = stage, total, unit, start
        self._stream = sys.stderr if stream is None else stream
        self._shows = hosts.is_first()
        self._clock, self._note = clock, _NOTE.get()
        self._terminal = bool(getattr(self._stream, "isatty", lambda: False)())
        self._began = self._shown = clock()
        self.tokens, self._texts, self._values, self._text = 0, 0, {}, ""
        self._marks = collections.deque([(self._began, start, 0)])
        self._bar = None
        global _current
        _current = self
        if self._terminal and self._shows:
            self._bar = tqdm.tqdm(total=total, initial=start, desc=f"[{stage}]", unit=unit, file=self._stream,
                                  dynamic_ncols=True, mininterval=0, miniters=1, bar_format=_BAR_FORMAT)
        elif start and self._shows:
            print(f"[{stage}] continues at {self.unit} {start:,} of {total:,}", file=self._stream, flush=True)

    def update(self, n: int = 1, tokens: int = 0, texts: int = 0, **values: Any) -> None:
        """Adds to the counts; `values` (scalars) replace the values shown before.

        Args:
          n: completed units.
          tokens: sampled or scored tokens.
          texts: sampled or scored texts. A unit may take many, which end together with those of other units.
          values: scalars, shown by name.
        """
        self.count += n
        self.tokens += tokens
        self._texts += texts
        if values:
            self._values = values
        now = self._clock()
        if self._shows and now - self._shown >= (_BAR_SECONDS if self._terminal else _LINE_SECONDS):
            self._show(now)

    def close(self, failed: bool = False) -> None:
        """Prints the last line. After a failure it does not fetch the values again, which could raise the same error."""
        global _current
        if _current is self:
            _current = None
        now = self._clock()
        if not self._shows:
            return
        if not failed:
            self._text = self._describe()
        if self._bar is not None:
            self._bar.set_postfix_str(self._text, refresh=False)
            self._bar.update(self.count - self._bar.n)
            self._bar.close()
            self._bar = None
        elif not self._terminal:
            verb = "stopped at" if failed or self.count < self.total else "finished"
            parts = [f"[{self.stage}] {verb} {self.count:,}/{self.total:,} {self.unit}s", self._text,
                     f"took {formatting.seconds(now - self._began)}"]
            print(", ".join(filter(None, parts)), file=self._stream, flush=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _show(self, now: float) -> None:
        self._shown = now
        self._marks.append((now, self.count, self.tokens))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _RATE_SECONDS:
            self._marks.popleft()
        began, count, tokens = self._marks[0]
        seconds = max(now - began, 1e-9)
        self._text = self._describe()
        text = self._text
        if self.tokens:
            text += f", {(self.tokens - tokens) / seconds:,.0f} tokens/s"
        if self.count > count:
            text += f", {formatting.seconds((self.total - self.count) * seconds / (self.count - count))} left"
        text = text.removeprefix(", ")
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(self.count - self._bar.n)
        else:
            share = f" ({self.count / self.total:.0%})" if self.total else ""
            place = f"[{self.stage}] {self.unit} {self.count:,}/{self.total:,}{share}"
            print(", ".join(filter(None, (place, text))), file=self._stream, flush=True)

    def _describe(self) -> str:
        parts = [f"{self._texts:,} texts"] if self._texts else []
        parts += [f"{name} {_short(value)}" for name, value in self._values.items()]
        return ", ".join(filter(None, (*parts, self._note() if self._note else "")))


def _short(value: Any) -> str:
    """`formatting.number`, but a number between -0.001 and 0.001 is shown with one digit: it changes from line to line."""
    shown = formatting.number(value)
    return f"{float(value):.1g}" if shown.startswith(("<", ">")) else shown
