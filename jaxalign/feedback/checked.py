"""Calls a judge, which may raise or return unusable results, and returns checked records on every process."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

from jaxalign.config import JudgeConfig
from jaxalign.errors import UserError
from jaxalign.feedback.judge import Draw, Rating, Text, Verdict
from jaxalign.parallel import hosts
from jaxalign.reasons import NOTES, PROBLEMS
from jaxalign.registry.custom import kind_and_place, wrong_result
from jaxalign.registry.judges import METHODS

_FAILED = {
    Text: Text("", complete=False, problem="failed"),
    Verdict: Verdict(None, problem="failed"),
    Rating: Rating(None, problem="failed"),
}


class _Failure(Exception):
    """A judge's method raised, or returned a number out of range; the text says what it did."""


class CheckedJudge:
    """Calls a judge and checks its results.

    Only the first process calls the judge, and all processes get the results, unless `on_all_processes` is set. A call fails if
    it raises or returns a number out of range. It is then repeated `settings.retries` times. If it still fails, its requests
    are asked one by one, and those that fail get a result with the problem "failed". A result of None or NaN has the problem
    "none" or "nan".

    Every method raises UserError on all processes if the judge lacks it, if more than `settings.max_failed_share` of the
    requests of a call failed, if it returns the wrong number or type of results, or if it raises UserError itself.

    Args:
      judge: an object with some of the methods of `Judge`, and optionally `loaded`. It may be None on all but the first process
        if only that one calls it.
      name: the judge's name in messages.
      settings: the number of retries and the share of requests that may fail.
      on_all_processes: the judge computes on the devices of all processes. Every process then calls it, and any error is
        raised as UserError without a retry, since the other processes may not have failed.
      in_run: whether a stage of a run asks the judge. Messages then name config fields, and otherwise arguments of
        `jaxalign.Judge`.
    """

    def __init__(
        self, judge: Any, name: str = "", settings: JudgeConfig | None = None, on_all_processes: bool = False,
        in_run: bool = True,
    ):
        called_here = on_all_processes or hosts.is_first()
        if called_here and not any(callable(getattr(judge, method, None)) for method in METHODS):
            raise UserError(f"the judge {name or judge!r} has none of the methods {', '.join(METHODS)}; see "
                            "jaxalign.feedback.judge.JudgeProtocol")
        self.judge, self.name = judge, name or getattr(judge, "name", type(judge).__name__)
        self.settings, self.on_all_processes, self._in_run = settings or JudgeConfig(), on_all_processes, in_run

    @contextlib.contextmanager
    def loaded(self) -> Iterator[CheckedJudge]:
        """A context with the judge's weights on the devices, for several calls in a row."""
        with contextlib.ExitStack() as stack:
            entered: list[Any] = []

            def enter() -> None:
                entered.append(stack.enter_context(self.judge.loaded()) if hasattr(self.judge, "loaded") else self.judge)

            if self.on_all_processes:
                enter()
            else:
                hosts.once(enter)  # If the first process fails, all processes raise.
            yield CheckedJudge(entered[0] if entered else None, self.name, self.settings, self.on_all_processes,
                               self._in_run)

    def _ask(self, method: str, kind: type, requests: Sequence[Any], draw: Draw) -> list[Any]:
        if not requests:
            return []
        if not self.on_all_processes:
            records = [kind(*fields) for fields in hosts.once(lambda: self._answers(method, kind, requests, draw))]
            return [record._replace(notes=tuple(record.notes)) for record in records]  # JSON has lists.
        try:
            return self._call(method, kind, requests, draw)
        except _Failure as error:
            raise UserError(f"judge {self.name!r} {error}") from error.__cause__

    # See `Judge`. Each takes (requests, draw).
    critique = functools.partialmethod(_ask, "critique", Text)
    revise = functools.partialmethod(_ask, "revise", Text)
    compare = functools.partialmethod(_ask, "compare", Verdict)
    rate = functools.partialmethod(_ask, "rate", Rating)

    def _answers(self, method: str, kind: type, requests: Sequence[Any], draw: Draw) -> list[Any]:
        """The results of the requests; those that fail again and again have the problem "failed"."""
        for _ in range(1 + self.settings.retries):
            try:
                return self._call(method, kind, requests, draw)
            except _Failure as error:
                first_error = error
        if self.settings.retries == 0 or len(requests) == 1:
            self._check_failed(method, len(requests), len(requests), len(requests), first_error)
            return [_FAILED[kind]] * len(requests)
        results, failed = [], 0
        for request, row in zip(requests, draw.rows, strict=True):
            try:
                results += self._call(method, kind, [request], Draw(draw.key, [row]))
            except _Failure as error:
                first_error = first_error if failed else error
                results.append(_FAILED[kind])
                failed += 1
                if failed > self.settings.max_failed_share * len(requests):  # Do not wait for the other requests to fail.
                    break
        self._check_failed(method, failed, len(results), len(requests), first_error)
        return results

    def _check_failed(self, method: str, failed: int, asked: int, count: int, error: _Failure) -> None:
        """Warns about the failed requests of one call. Raises UserError if there are too many.

        Args:
          asked: the number of requests that the judge has received; below `count` if the run stops early.
        """
        share = self.settings.max_failed_share
        if failed > share * count:
            limit, remedy = ("config.judge.max_failed_share", "fix the cause and run again: a stage continues after its last "
                             "finished rows") if self._in_run else ("Judge(max_failed_share)", "fix the cause, or raise it")
            of = f"{count} requests to {method!r}" if asked == count else (
                f"the first {asked} requests to {method!r}, of {count} in all")
            raise UserError(f"judge {self.name!r} failed to answer {failed} of {of} (it "
                            f"{error}), more than {limit} ({share}) allows; {remedy}") from error.__cause__
        if failed:
            logging.getLogger("jaxalign").warning(
                "judge %r failed to answer %d of %d requests to %r (it %s); these requests have no result",
                self.name, failed, count, method, error,
            )

    def _call(self, method: str, kind: type, requests: Sequence[Any], draw: Draw) -> list[Any]:
        """One call: the checked results. Raises _Failure if the judge raises anything but UserError."""
        ask = getattr(self.judge, method, None)
        if not callable(ask):
            other = "choose another judge (config.feedback.judge)" if self._in_run else "give another judge"
            raise UserError(f"judge {self.name!r} has no method {method!r}, which is needed here; add it, or {other}")
        try:
            results = ask(requests, draw)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # A custom judge may raise anything.
            raise _Failure(f"raised {kind_and_place(error, ask)} in {method!r}: {error}") from error
        if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != len(requests):
            count = f"{len(results)} results" if hasattr(results, "__len__") else f"a value of type {type(results).__name__}"
            raise wrong_result(f"judge {self.name!r}", f"{count} from {method!r} for {len(requests)} requests", "a list with "
                               f"one {kind.__name__} per request")
        return [self._checked(method, kind, result) for result in results]

    def _checked(self, method: str, kind: type, result: Any) -> Any:
        """The result as a record of JSON values. A bare text or number is a record with defaults for the other fields."""
        bare = result is None or isinstance(result, str if kind is Text else numbers.Real)
        if not bare and not isinstance(result, kind):
            raise self._invalid(method, result, f"a {kind.__name__}")
        record = kind(result) if bare else result
        if record.problem not in (None, *PROBLEMS):
            raise self._invalid(method, result, f"a problem among {', '.join(PROBLEMS)}, or None,")
        if not isinstance(record.reasoning, str | None):
            raise self._invalid(method, result, "a reasoning of type str, or None,")
        unknown = next((note for note in record.notes if note not in NOTES), None)
        if unknown is not None:
            raise self._invalid(method, result, f"a tuple of notes among {', '.join(NOTES)}")
        if kind is Text:
            text, problem = record.text, record.problem
            if text is None:
                text, problem = "", problem or "none"
            if not isinstance(text, str):
                raise self._invalid(method, record, "a text of type str")
            text = text.encode("utf-8", "replace").decode("utf-8")  # Unpaired surrogates become "?", as in files.
            return record._replace(text=text, complete=bool(record.complete) and problem is None, problem=problem)
        shares = {name: getattr(record, name) for name in ("outside", "disagreement", "tie") if hasattr(record, name)}
        for name, value in shares.items():
            if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
                raise self._invalid(method, result, f"a finite number, or None, as {name}")
        # Numpy's numbers are not JSON values.
        record = record._replace(**{name: None if value is None else float(value) for name, value in shares.items()})
        low, high = (0, 1) if kind is Verdict else (1, 10)
        number, problem = self._number(method, record[0], record.problem, low, high)
        return record._replace(**{record._fields[0]: number}, problem=problem)

    def _number(self, method: str, value: Any, problem: str | None, low: float, high: float) -> tuple[float | None, str | None]:
        """(the number of a Verdict or Rating, the problem if there is none)."""
        if value is None or problem is not None:
            return None, problem or "none"
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.inf
        if math.isnan(number):
            return None, "nan"
        if not low <= number <= high:
            raise _Failure(f"returned {value!r} from {method!r}; a number from {low} to {high} is expected")
        return number, None

    def _invalid(self, method: str, result: Any, expected: str) -> UserError:
        return wrong_result(f"judge {self.name!r}", f"{result!r} of type {type(result).__name__} from {method!r}", expected)
