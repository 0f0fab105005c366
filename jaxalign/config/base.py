"""The base class of config sections, and checks that several sections share. Errors suggest the nearest valid values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxalign.errors import UserError


class WholeConfig(Protocol):
    """The type of the whole config in a section's check. `jaxalign.config.root.Config` itself imports the sections."""

    stages: tuple[str, ...]

    def __getattr__(self, section: str) -> Any: ...


class Section:
    """A section of the config. A subclass is a frozen dataclass with fields built by `field` and `section`."""

    def check(self, config: WholeConfig, name: str) -> None:
        """Raises UserError if fields of this section conflict with each other or with the rest of `config`.

        Args:
            config: the whole config.
            name: this section's dotted name, such as "ppo" or "ppo.optimizer".
        """


def check_response_length(section: Any, config: WholeConfig, name: str) -> None:
    """Checks that `max_new_tokens` leaves space for a prompt."""
    if section.max_new_tokens >= config.model.max_length:
        raise UserError(f"config.{name}.max_new_tokens is {section.max_new_tokens}; it must be below config.model.max_length "
                        f"({config.model.max_length}), which includes the prompt")


def check_dialogue_length(section: Any, config: WholeConfig, name: str) -> None:
    """Checks that the model can read the section's longest dialogue."""
    if section.max_length > config.model.max_length:
        raise UserError(f"config.{name}.max_length is {section.max_length}; it must be at most config.model.max_length "
                        f"({config.model.max_length})")


def nearest_divisors(sizes: Sequence[int], asked: int) -> str:
    """The nearest numbers below and above `asked` that divide all of `sizes`, such as "2 or 4"."""
    common = math.gcd(*sizes)
    fits = [number for number in range(1, common + 1) if common % number == 0]
    return " or ".join(str(n) for n in ([n for n in fits if n < asked][-1:] + [n for n in fits if n > asked][:1]))


def check_divides(field: str, ways: int, sizes: Mapping[str, int]) -> None:
    """Raises UserError if `ways`, the value of `field`, does not divide all `sizes`, which are keyed by field name."""
    for name, size in sizes.items():
        if size % ways:
            near = nearest_divisors(tuple(sizes.values()), ways)
            raise UserError(f"{field} is {ways}; it must divide {name} ({size}): set it to {near}, or change {name}")


def check_multiple(field: str, rows: int, factors: Mapping[str, int]) -> None:
    """Raises UserError unless `rows`, the value of `field`, is a multiple of the product of `factors`, keyed by field name."""
    product = math.prod(factors.values())
    if rows % product == 0:
        return
    words = [f"{name} ({size})" for name, size in factors.items() if size > 1]
    near = " or ".join(str(x) for x in (rows // product * product, -(-rows // product) * product) if x)
    raise UserError(f"{field} is {rows}; it must be a multiple of {' x '.join(words)}"
                    + (f" = {product}" if len(words) > 1 else "") + f", such as {near}")
