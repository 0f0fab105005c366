"""Calls a user's reward function, which may be slow, fail or return NaN, and returns finite scores.

A reward callable has the signature `(prompts, responses, **columns) -> scores`; `columns` are the data set's other columns,
each a list with one entry per row. It returns one entry per response: a number, or a list of one number per token. An entry
that is None, or has NaN or infinity, means that the row has no score. A parameter named like one of `DETAILS` receives that.
This module is plain Python on the host; scores become arrays only in `call_reward`.
"""

from __future__ import annotations

import copy
import inspect
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxalign.data.tokenizers.base import Tokenizer
from jaxalign.endpoint.redaction import redact_secrets
from jaxalign.errors import UserError
from jaxalign.registry.custom import kind_and_place

RewardCallable = Callable[..., Sequence[Any]]

DETAILS = ("token_ids", "ended", "raw_responses")
"""Parameters that a callable may name, unless a column has the name: each response's token ids with its stop token, if any;
whether a stop token ended it; and its text with special tokens."""

_SHOWN = 200  # A report keeps this many characters of an error or an entry.


def details(tokenizer: Tokenizer, ids: Sequence[Sequence[int]], ended: Sequence[bool]) -> dict[str, list[Any]]:
    """`DETAILS` by name, for responses with these token ids."""
    columns = [list(map(int, own)) for own in ids], list(ended), [tokenizer.decode_raw(own) for own in ids]
    return dict(zip(DETAILS, columns, strict=True))


class RewardReport(NamedTuple):
    """What went wrong in one batch.

    first_error: the first bad entry of the accepted result or, if it has none, why the first call failed; None if nothing
    failed. cause: the exception that `first_error` describes; None if it describes something else, or if a traceback of the
    exception would show a secret.
    """

    first_error: str | None = None
    cause: BaseException | None = None


def call_reward(
    fn: RewardCallable,
    prompts: Sequence[Any],
    responses: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None = None,
    retries: int = 2,
    timeout_s: float | None = 60.0,
    backoff_s: float = 1.0,
    details: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[np.ndarray, np.ndarray, RewardReport]:
    """The callable's scores for a batch, always as finite arrays.

    A call fails if it raises, takes longer than `timeout_s`, or returns anything but one entry per row. An entry is a number
    or, with `details`, one number per token; if another row has numbers per token, a single number counts at the last token.
    Retries follow after backoff_s, 2 backoff_s, 4 backoff_s... seconds;
    if the last one also fails, all rows are dropped. A single row is dropped,
    without a retry, if its entry is None, NaN, infinite, outside float32's range or not a number. The caller must mask dropped
    rows.

    The callable runs in its own thread, on copies of its arguments. A call that hangs is abandoned: its thread keeps running,
    its result is ignored, and a retry may run concurrently. A call that hangs while holding the GIL cannot be abandoned.

    Args:
      fn: `(prompts, responses, **columns) -> scores`, which returns a list, tuple or 1-D array. A UserError that it raises is
        re-raised: its arguments are wrong, and a retry would not help.
      prompts: B prompts, of any type that the callable takes.
      responses: B texts.
      columns: other columns by name, B entries each.
      retries: additional calls after the first; not negative.
      timeout_s: time limit of a call in seconds, above 0; None for no limit.
      backoff_s: seconds before the first retry; not negative.
      details: B entries for each of `DETAILS`; the callable receives those that it names.

    Returns:
      (scores, kept, report): float32 [B], or [B, T] if a row has numbers per token (T: the most tokens of a row), finite,
      0 where dropped and past the end; bool [B]; a `RewardReport`. With 0 rows, `fn` is not called.

    Raises:
      UserError: `fn` is not a plain callable, a column has the wrong length or a reserved name, or a setting is out of range.
    """
    columns = dict(columns or {})
    counts = None if details is None else [len(ids) for ids in details["token_ids"]]
    columns = _named(fn, details or {}) | columns
    _check_call(fn, prompts, responses, columns, retries, timeout_s, backoff_s)
    rows = len(responses)
    if rows == 0:
        return np.zeros(0, np.float32), np.zeros(0, bool), RewardReport()
    first_error, cause = None, None
    for call in range(1 + retries):
        if call:
            time.sleep(backoff_s * 2 ** (call - 1))
        entries, failure, error = _attempt(fn, prompts, responses, columns, timeout_s, counts)
        if failure is None:
            scores, kept, bad_entry = _clean(entries, counts)
            return scores, kept, RewardReport(first_error, cause) if bad_entry is None else RewardReport(bad_entry)
        first_error, cause = (failure, error) if first_error is None else (first_error, cause)
    return np.zeros(rows, np.float32), np.zeros(rows, bool), RewardReport(first_error, cause)


def _named(fn: Any, details: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """The details that the callable has parameters for."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # Not callable, or written in C.
        return {}
    return {name: column for name, column in details.items() if name in parameters}


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
    fn: RewardCallable, prompts: Any, responses: Any, columns: Mapping[str, Any], timeout_s: float | None,
    counts: Sequence[int] | None,
) -> tuple[list[Any], str | None, BaseException | None]:
    """One call: (entries, the reason if it failed, the exception that it raised and that may be shown)."""
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    given = list(prompts), list(responses), {name: list(column) for name, column in columns.items()}

    def work() -> None:
        try:
            # A retry, and the other rewards of the run, must not see what the callable changes.
            asked, texts, others = copy.deepcopy(given)
            done.put((_entries(fn(asked, texts, **others), 1 if counts is None else 2), None))
        # Catch SystemExit too: in a thread it is silent, and the call would seem to hang.
        except BaseException as error:
            done.put((None, error))

    # Make it a daemon, so that an abandoned call cannot keep the program from exiting.
    threading.Thread(target=work, name="reward", daemon=True).start()
    try:
        entries, error = done.get(timeout=timeout_s)
    except queue.Empty:
        return [], f"{_name(fn)} did not return within {timeout_s:g} s", None
    if isinstance(error, UserError):
        raise UserError(redact_secrets(str(error))) from None
    if error is not None:
        why = f"{_name(fn)} raised {kind_and_place(error, fn)}: {_text(error)}"
        return [], why, None if _shows_secret(error) else error
    if not isinstance(entries, list):
        return [], f"{_name(fn)} returned {entries}; a list of {len(responses)} numbers is expected", None
    if len(entries) != len(responses):
        return [], f"{_name(fn)} returned {len(entries)} scores for {len(responses)} responses", None
    for row, (entry, count) in enumerate(zip(entries, counts or (), strict=False)):
        if _is_row(entry) and len(entry) != count:
            why = f"{len(entry)} numbers for the {count} tokens of response {row}; one number, or one per token, is expected"
            return [], f"{_name(fn)} returned {why}", None
    return entries, None, None


def _is_row(entry: Any) -> bool:
    return isinstance(entry, (list, tuple)) or getattr(entry, "ndim", 0) == 1


def _entries(result: Any, most_axes: int) -> list[Any] | str:
    """The result, at most an array of `most_axes` axes, as a list, or a description of a result that is not one."""
    if isinstance(result, (list, tuple)):
        return list(result)
    if hasattr(result, "__array__") and not isinstance(result, str):
        array = np.asarray(result)
        return list(array) if 1 <= array.ndim <= most_axes else f"an array of shape {array.shape}"
    return "None" if result is None else f"a value of type {type(result).__name__}"


def _clean(entries: list[Any], counts: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray, str | None]:
    """(scores float32 [B] or [B, T], kept bool [B], a description of the first invalid entry or None)."""
    rows, first = len(entries), None
    per_token = counts is not None and any(map(_is_row, entries))
    scores, kept = np.zeros((rows, max(counts)) if per_token else rows, np.float32), np.zeros(rows, bool)
    for row, entry in enumerate(entries):
        numbers = [_score(number) for number in (entry if per_token and _is_row(entry) else [entry])]
        kept[row] = all(number is not None for number in numbers)
        if kept[row] and per_token:  # A single number counts at the last token.
            scores[row, counts[row] - len(numbers) : counts[row]] = numbers[: counts[row]]
        elif kept[row]:
            scores[row] = numbers[0]
        elif first is None:
            shown = repr(_text(entry)) if isinstance(entry, (str, bytes)) else _text(entry)
            first = f"the score of row {row} is {shown} ({type(entry).__name__}); a finite number is expected"
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
        return redact_secrets(str(x))[:_SHOWN]
    except Exception:
        return "not printable"


def _shows_secret(error: BaseException) -> bool:
    try:
        shown = "".join(traceback.format_exception(error))
        return redact_secrets(shown) != shown
    except Exception:  # An exception that cannot be printed.
        return True


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or getattr(getattr(fn, "func", None), "__qualname__", type(fn).__name__)
