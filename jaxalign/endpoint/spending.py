"""Counts of requests, tokens, failures and money, and the budget."""

from __future__ import annotations

import collections
import datetime
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxalign.config.sections.endpoint import EndpointConfig
from jaxalign.endpoint.records import Reply, Usage
from jaxalign.endpoint.store import AnswerStore
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json

_MILLION = 1_000_000
_NAMES = ("sent", "stored_hits", "prompt_tokens", "completion_tokens", "retries", "content_filter")
_MONEY, _FINISHED = "money", "finished"
FAILURE = "failures."
"""The name of a count of failures begins with this; the kind of the failure follows."""


class BudgetReached(UserError):
    """The money spent has reached config.endpoint.budget. All replies are stored."""


class Price(NamedTuple):
    """The price of a million tokens, in any currency."""

    input: float
    output: float

    def of(self, usage: Usage) -> float:
        return (usage.prompt * self.input + usage.completion * self.output) / _MILLION


class TokenPrices:
    """The prices of the models: those of config.endpoint.prices, or input_price and output_price for every model.

    Attributes:
      date: the date of the prices; "" without a file.
      are_set: whether any model has a price.

    Raises:
      UserError: the file does not exist or is not a file of prices.
    """

    def __init__(self, settings: EndpointConfig):
        self._path, self.date = settings.prices, ""
        self._default = Price(settings.input_price, settings.output_price)
        self._models: dict[str, Price] = {}
        self.are_set = bool(settings.prices) or any(self._default)
        if settings.prices:
            self.date, self._models = _read_prices(settings.prices)
        elif settings.budget > 0 and not self.are_set:
            raise UserError(f"config.endpoint.budget is {settings.budget:g}, but no prices are set; set "
                            "config.endpoint.prices, or config.endpoint.input_price and output_price")

    def of(self, model: str) -> Price:
        """The price of a model.

        Raises:
          UserError: the file of prices does not list the model.
        """
        if not self._path:
            return self._default
        if model not in self._models:
            raise UserError(f'config.endpoint.prices="{self._path}" has no price of model "{model}"; add it under "models"')
        return self._models[model]


class Spending:
    """Thread-safe counts of a client's requests, and of the requests of one stage at a time.

    The amount that the budget limits is the sum in the store. It therefore includes replies of earlier runs, and of other runs
    that share the store. The counts of a stage are kept in the store, too, so that they survive the end of the process.

    Attributes:
      prices: the prices of the models.
    """

    def __init__(self, settings: EndpointConfig, store: AnswerStore):
        self._budget, self._store, self.prices = settings.budget, store, TokenPrices(settings)
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._stage = ""
        self._of_stage: collections.Counter[str] = collections.Counter()
        self._unsaved: collections.Counter[str] = collections.Counter()

    def check_budget(self) -> None:
        """Raises BudgetReached if the store's sum has reached the budget."""
        if self._budget > 0 and (spent := self._store.cost()) >= self._budget:
            raise BudgetReached(f"{spent:.6g} of config.endpoint.budget={self._budget:g} are spent; raise "
                                "config.endpoint.budget and repeat the run, which continues from the stored answers")

    def begin_stage(self, stage: str, resumed: bool) -> None:
        """Counts for a stage until `end_stage`, or until the next stage begins.

        Counts of an earlier start that did not finish are kept, even if the stage begins again: its answers are stored, and
        the stage uses them.

        Args:
          stage: the stage's name in the store.
          resumed: whether the stage continues. If it does not, the counts of an earlier stage that finished are removed.
        """
        counts = self._store.counts(stage)
        if counts.get(_FINISHED) and not resumed:
            self._store.remove_counts(stage)
            counts = {}
        with self._lock:
            self._stage, self._of_stage, self._unsaved = stage, collections.Counter(counts), collections.Counter()

    def end_stage(self) -> None:
        """Ends the counting for a stage that has finished."""
        if not self._of_stage[_FINISHED]:
            self.count(_FINISHED)
        self.save_stage()
        with self._lock:
            self._stage = ""

    def save_stage(self) -> None:
        """Writes the new counts of the stage to the store."""
        with self._lock:
            stage, unsaved, self._unsaved = self._stage, self._unsaved, collections.Counter()
        if changed := {name: value for name, value in unsaved.items() if value}:
            self._store.add_counts(stage, changed)

    def of_stage(self) -> dict[str, Any]:
        """The counts of the present or last stage over all its starts, with the fields of `as_dict` except "money_of_store"."""
        with self._lock:
            return {**_fields(self._of_stage), "prices_date": self.prices.date}

    def count(self, name: str, number: float = 1) -> None:
        """Adds to "sent", "retries", "stored_hits" or `FAILURE` + the kind of a failure."""
        with self._lock:
            for counter in (self._counts, self._of_stage, self._unsaved) if self._stage else (self._counts,):
                counter[name] += number
        if name == "stored_hits":
            self.save_stage()

    def count_reply(self, reply: Reply, cost: float) -> None:
        """Counts a reply that the server sent."""
        self.count("prompt_tokens", reply.usage.prompt)
        self.count("completion_tokens", reply.usage.completion)
        self.count("content_filter", int(reply.finish == "content_filter"))
        self.count(_MONEY, cost)
        self.save_stage()

    def as_dict(self) -> dict[str, Any]:
        """The counts since the client was created: requests that were sent (retries included), stored replies that were used,
        tokens, retries, failures by kind, refusals of content filters, money; the money of the store; the date of the prices.
        """
        with self._lock:
            counts = _fields(self._counts)
        return {**counts, "money_of_store": self._store.cost(), "prices_date": self.prices.date}


def _fields(counts: Mapping[str, float]) -> dict[str, Any]:
    failures = {name.removeprefix(FAILURE): int(counts[name]) for name in sorted(counts) if name.startswith(FAILURE)}
    return {**{name: int(counts.get(name, 0)) for name in _NAMES}, "failures": failures, "money": counts.get(_MONEY, 0.0)}


def _read_prices(path: str) -> tuple[str, dict[str, Price]]:
    form = '{"date": "YYYY-MM-DD", "models": {name: {"input": number, "output": number}}}'
    try:
        with open(path, encoding="utf-8") as file:
            content = parse_json(file.read())
    except (OSError, ValueError) as error:
        raise UserError(f'config.endpoint.prices="{path}" cannot be read ({error}); {form} is expected') from None
    try:
        date = datetime.date.fromisoformat(content["date"]).isoformat()
        models = {name: Price(float(price["input"]), float(price["output"])) for name, price in content["models"].items()}
        is_valid = all(0 <= number < float("inf") for price in models.values() for number in price)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f'config.endpoint.prices="{path}" is malformed ({type(error).__name__}: {error}); {form} is '
                        "expected") from None
    if not is_valid:
        raise UserError(f'config.endpoint.prices="{path}" has a price below 0 or not finite; correct it')
    return date, models
