"""Calls a user's reward function, which may be slow, fail or return NaN, and returns finite scores.

A reward callable has the signature `(prompts, responses, **columns) -> list of float`, with one score per response; `columns`
are the data set's other columns, each a list with one entry per row. An entry that is None, NaN or infinite means that the row
has no score. This module is plain Python on the host; scores become arrays only in `call_reward`.
"""

from __future__ import annotations

import dataclasses
import inspect
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxalign.errors import UserError

RewardCallable = Callable[..., Sequence[float]]

_SHOWN = 200  # A report keeps this many characters of an error or an entry.


@dataclasses.dataclass(frozen=True)
class RewardReport:
    """Counts for one batch. rows = kept + dropped; calls counts attempts.

    bad_entries: rows of an accepted result whose entry was None, NaN, infinite or not a number. failures: calls that raised,
    hung or returned anything but a list with one entry per row. timeouts: the calls that hung. first_error: the first bad
    entry of the accepted result or, if it has none, why the first call failed; None if nothing failed.
    """

    rows: int
    dropped: int
    bad_entries: int
    calls: int
    failures: int
    timeouts: int
    first_error: str | None


def call_reward(
    fn: RewardCallable,
    prompts: Sequence[Any],
    responses: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None = None,
    retries: int = 2,
    timeout_s: float | None = 60.0,
    backoff_s: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, RewardReport]:
    """The callable's scores for a batch, always as finite arrays.

    A call fails if it raises, takes longer than `timeout_s`, or returns anything but one entry per row. Retries follow after
    backoff_s, 2 backoff_s, 4 backoff_s... seconds; if the last one also fails, all rows are dropped. A single row is dropped,
    without a retry, if its entry is None, NaN, infinite, outside float32's range or not a number. The caller must mask dropped
    rows.

    The callable runs in its own thread, on copies of the lists. A call that hangs is abandoned: its thread keeps running, its
    result is ignored, and a retry may run concurrently. A call that hangs while holding the GIL cannot be abandoned.

    Args:
      fn: `(prompts, responses, **columns) -> scores`, which returns a list, tuple or 1-D array. A UserError that it raises is
        re-raised: its arguments are wrong, and a retry would not help.
      prompts: B prompts, of any type that the callable takes.
      responses: B texts.
      columns: other columns by name, B entries each.
      retries: additional calls after the first; not negative.
      timeout_s: time limit of a call in seconds, above 0; None for no limit.
      backoff_s: seconds before the first retry; not negative.

    Returns:
      (scores, kept, report): float32 [B], finite, 0 where dropped; bool [B]; a `RewardReport`. With 0 rows, `fn` is not called.

    Raises:
      UserError: `fn` is not a plain callable, a column has the wrong length or a reserved name, or a setting is out of range.
    """
    columns = dict(columns or {})
    _check_call(fn, prompts, responses, columns, retries, timeout_s, backoff_s)
    rows = len(responses)
    if rows == 0:
        return np.zeros(0, np.float32), np.zeros(0, bool), RewardReport(0, 0, 0, 0, 0, 0, None)
    timeouts, first_error = 0, None
    for call in range(1 + retries):
        if call:
            time.sleep(backoff_s * 2 ** (call - 1))
        entries, failure, timed_out = _attempt(fn, prompts, responses, columns, timeout_s)
        if failure is None:
            scores, kept, bad_entry = _clean(entries)
            dropped = rows - int(kept.sum())
            report = RewardReport(rows, dropped, dropped, call + 1, call, timeouts, bad_entry or first_error)
            return scores, kept, report
        timeouts += timed_out
        first_error = first_error or failure
    report = RewardReport(rows, rows, 0, 1 + retries, 1 + retries, timeouts, first_error)
    return np.zeros(rows, np.float32), np.zeros(rows, bool), report


def _check_call(
    fn: Any, prompts: Any, responses: Any, columns: Mapping[str, Any], retries: int, timeout_s: Any, backoff_s: float
) -> None:
    if not callable(fn):
        raise UserError(
            f"the reward is of type {type(fn).__name__}; a callable (prompts, responses, **columns) -> scores is expected"
        )
    if inspect.iscoroutinefunction(fn):
        raise UserError(f"the reward {_name(fn)} is a coroutine function; give a plain function, which may call asyncio.run")
    for name, column in {"prompts": prompts, **columns}.items():
        if len(column) != len(responses):
            raise UserError(f"{name} has {len(column)} entries but there are {len(responses)} responses; one entry per row is "
                            "expected")
    taken = {"prompts", "responses"} & set(columns)
    if taken:
        raise UserError(f"a column is called {sorted(taken)[0]!r}, the name of an argument of every reward; rename it")
    try:
        inspect.signature(fn).bind(prompts, responses, **columns)
    except TypeError as error:
        given = ", ".join(("prompts", "responses", *columns))
        raise UserError(f"the reward {_name(fn)} cannot be called with {given}: {error}; define it as "
                        "(prompts, responses, **columns)") from error
    except ValueError:  # A function written in C may have no signature.
        pass
    if retries < 0 or not backoff_s >= 0 or (timeout_s is not None and not timeout_s > 0):
        raise UserError(
            f"the reward is called with retries = {retries}, timeout_s = {timeout_s}, backoff_s = {backoff_s}; retries and "
            "backoff_s must not be negative, and timeout_s must be above 0 or None"
        )


def _attempt(
    fn: RewardCallable, prompts: Any, responses: Any, columns: Mapping[str, Any], timeout_s: float | None
) -> tuple[list[Any], str | None, bool]:
    """One call: (entries, the reason if it failed, whether it hung)."""
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    copies = {name: list(column) for name, column in columns.items()}

    def work(prompts: list[Any], responses: list[str]) -> None:
        try:
            done.put((_entries(fn(prompts, responses, **copies)), None))
        # Catch SystemExit too: in a thread it is silent, and the call would seem to hang.
        except BaseException as error:
            done.put((None, error))

    # Make it a daemon, so that an abandoned call cannot keep the program from exiting.
    threading.Thread(target=work, args=(list(prompts), list(responses)), name="reward", daemon=True).start()
    try:
        entries, error = done.get(timeout=timeout_s)
    except queue.Empty:
        return [], f"{_name(fn)} did not return within {timeout_s:g} s", True
    if isinstance(error, UserError):
        raise error
    if error is not None:
        return [], f"{_name(fn)} raised {type(error).__name__}: {_text(error)}", False
    if not isinstance(entries, list):
        return [], f"{_name(fn)} returned {entries}; a list of {len(responses)} numbers is expected", False
    if len(entries) != len(responses):
        return [], f"{_name(fn)} returned {len(entries)} scores for {len(responses)} responses", False
    return entries, None, False


def _entries(result: Any) -> list[Any] | str:
    """The result as a list, or a description of a result that is not one."""
    if isinstance(result, (list, tuple)):
        return list(result)
    if hasattr(result, "__array__") and not isinstance(result, str):
        array = np.asarray(result)
        return list(array) if array.ndim == 1 else f"an array of shape {array.shape}"
    return "None" if result is None else f"a value of type {type(result).__name__}"


def _clean(entries: list[Any]) -> tuple[np.ndarray, np.ndarray, str | None]:
    """(scores float32 [B], kept bool [B], a description of the first invalid entry or None)."""
    scores, kept = np.zeros(len(entries), np.float32), np.zeros(len(entries), bool)
    first = None
    for row, entry in enumerate(entries):
        score = _score(entry)
        kept[row] = score is not None
        if score is not None:
            scores[row] = score
        elif first is None:
            first = f"the score of row {row} is {_text(entry)} ({type(entry).__name__})"
    return scores, kept, first


def _score(entry: Any) -> np.float32 | None:
    """A finite float32, or None. A string is never a score, even if it spells a number."""
    if entry is None or isinstance(entry, (str, bytes)):
        return None
    try:
        with np.errstate(over="ignore"):
            score = np.float32(float(entry))
    except Exception:
        return None
    return score if np.isfinite(score) else None


def _text(x: Any) -> str:
    try:
        return str(x)[:_SHOWN]
    except Exception:
        return "not printable"


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or getattr(getattr(fn, "func", None), "__qualname__", type(fn).__name__)
