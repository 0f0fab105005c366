"""Stop texts: texts that end a response. Responses are cut after they are sampled, so stop texts save no time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxalign.config.arguments import as_text, instance_of
from jaxalign.errors import UserError
from jaxalign.rollout.responses import Response
from jaxalign.rollout.sampler import TokenSampler
from jaxalign.rollout.sampling import Sampling

Decode = Callable[[Sequence[int]], str]


def checked_stops(stop: Any, name: str) -> tuple[str, ...]:
    """The stop texts of an argument, as a tuple. Raises UserError unless it is a list of non-empty texts."""
    instance_of(stop, list | tuple, name, "a list of texts")
    if not all(as_text(end, f"{name}[{index}]") for index, end in enumerate(stop)):
        raise UserError(f"{name} has an empty text, which would end every answer at once; remove it")
    return tuple(stop)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the stop texts; the whole text if it has none."""
    return text[: min((text.index(end) for end in stop if end in text), default=len(text))]


def cut_response(response: Response, stop: Sequence[str], decode: Decode) -> Response:
    """The response up to the token that completes the first stop text, which it records as `stop`; unchanged if it has none.

    Args:
      response: a response without an error.
      stop: the stop texts.
      decode: the text of the first tokens of the response.
    """
    written = response.ids[: len(response.ids) - response.ended]
    if not any(end in decode(written) for end in stop):
        return response
    counts = range(1, len(written) + 1)
    count = next(count for count in counts if any(end in decode(written[:count]) for end in stop))
    text, logprobs = decode(written[:count]), response.logprobs[:count]
    first = min((end for end in stop if end in text), key=text.index)
    return dataclasses.replace(
        response, ids=response.ids[:count], ended=True, logprob=float(sum(logprobs)), logprobs=logprobs,
        versions=response.versions[:count], stop=first,
    )


def response_text(response: Response, decode: Decode) -> str:
    """The text of a response without its stop token or its stop text. decode: the text of token ids."""
    if response.stop:
        return before_stop(decode(response.ids), [response.stop])
    return decode(response.ids[: len(response.ids) - response.ended])


class StoppingSampler:
    """Ends the responses of another sampler at stop texts.

    Args:
      sampler: a `TokenSampler`.
      stop: the stop texts.
      decode: the text of token ids, in which stop texts are searched.
    """

    def __init__(self, sampler: TokenSampler, stop: Sequence[str], decode: Decode):
        self._sampler, self._stop, self._decode = sampler, tuple(stop), decode

    @property
    def unfinished(self) -> int:
        return self._sampler.unfinished

    def submit(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], key: jax.Array, sampling: Sampling) -> None:
        self._sampler.submit(prompts, rows, key, sampling)

    def collect(self) -> list[tuple[int, Response]]:
        return [(row, self._cut(response)) for row, response in self._sampler.collect()]

    def update(self, params: Any, version: int) -> None:
        self._sampler.update(params, version)

    def _cut(self, response: Response) -> Response:
        # The caller reports malformed responses of custom samplers, so they are passed on as they are.
        if not isinstance(response, Response) or response.error is not None:
            return response
        if not len(response.ids) == len(response.logprobs) == len(response.versions):
            return response
        return cut_response(response, self._stop, self._decode)
