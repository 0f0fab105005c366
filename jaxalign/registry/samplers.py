"""Samplers: the records that `config.sampler` selects from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxalign.registry.core import Record, Registry, maker_record

METHODS = ("submit", "collect", "update")
"""The methods of a sampler."""


@dataclasses.dataclass(frozen=True)
class SamplerRecord(Record):
    """A kind of sampler.

    Attributes:
      name: its name in the config.
      make: `make(engine) -> TokenSampler`, or "module:attribute" of such a function, imported on first use. The engine
        (`jaxalign.rollout.sampler.Engine`) has the model, the number of rows decoded together, and the maximum sequence
        length. The result has the methods of `jaxalign.rollout.sampler.TokenSampler`.
    """

    name: str
    make: Callable[[Any], Any] | str
    _where = "{part} of sampler {name!r}"


SAMPLERS = Registry("sampler", SamplerRecord, (SamplerRecord("local", "jaxalign.rollout.sampler:LocalSampler"),))


def sampler_record(name: str, where: str = "config.sampler") -> SamplerRecord:
    """The registered record with this name, or a record for the class or function at "package.module:name" or "FILE.py:name".

    Args:
      name: the name or location.
      where: the field or argument with the name, for error messages.

    Raises:
      UserError: there is no such record or object, its module cannot be imported, or it cannot create a sampler.
    """
    return maker_record(SAMPLERS, name, where, METHODS, "a class with the methods submit, collect and update, or a function "
                        "that takes an engine and returns such an object,")
