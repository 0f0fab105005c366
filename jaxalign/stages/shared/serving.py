"""A language model's answers to dialogues, for the command line: in batches, or streamed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from jaxalign.data.chat.dialogues import cut_front
from jaxalign.data.chat.styles import encode_prompt
from jaxalign.errors import UserError
from jaxalign.models.language_model import LanguageModel
from jaxalign.records import Message
from jaxalign.rollout.engine import Engine, Response
from jaxalign.rollout.sampling import Sampling, section_sampling


@dataclasses.dataclass(frozen=True)
class Answerer:
    """Answers dialogues in batches, or streams one answer.

    Attributes:
      policy: the language model.
      sampling: the sampling settings, including the ids that end an answer in the policy's style.
      batch: the number of answers to sample together.
    """

    policy: LanguageModel
    sampling: Sampling
    batch: int

    @property
    def longest_prompt(self) -> int:
        """The maximum length of a prompt, in tokens."""
        return self.policy.max_length - self.sampling.max_new_tokens

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a dialogue."""
        return encode_prompt(self.policy.tokenizer, messages, self.policy.style)

    def fitting(self, messages: Sequence[Message]) -> tuple[Message, ...] | None:
        """The dialogue without the oldest turns that leave no space for an answer; a system message is kept. None if the last
        turn is too long."""
        kept = 1 if messages[0].role == "system" else 0
        system, turns = tuple(messages[:kept]), tuple(messages[kept:])
        found = cut_front(turns, lambda part: len(self.encode([*system, *part])) <= self.longest_prompt)
        return None if found is None else (*system, *found)

    def respond(self, prompts: Sequence[Sequence[int]], key: jax.Array, rows: Sequence[int]) -> list[Response]:
        """One answer to each prompt; answer i has the global row number rows[i]. If a prompt cannot be answered, the
        response's `error` says why."""
        return self._engine.respond(self.policy.weights, prompts, key, self.sampling, rows)

    def stream(self, prompt: Sequence[int], key: jax.Array, row: int) -> Iterator[tuple[int, ...]]:
        """The ids of one answer, chunk by chunk, equal to those of `respond`. Raises UserError if `respond` gives an error."""
        session = self._engine.start(self.policy.weights, [prompt], key, self.sampling, [row])
        shown = 0
        while session.unfinished:
            ended = session.step()
            ids = session.written(0)
            for _, response in ended:
                if response.error is not None:
                    raise UserError(response.error)
                ids = response.ids[:-1] if response.ended else response.ids
            yield ids[shown:]
            shown = len(ids)

    def text(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """The text of an answer."""
        return self.policy.text(ids, prompt)

    def say(self, prompt: Sequence[int], key: jax.Array, row: int, show: Callable[[str], None]) -> str:
        """The text of one answer. Calls `show` with each new piece of the text once no later token can change it."""
        ids: list[int] = []
        shown = text = ""
        for chunk in self.stream(prompt, key, row):
            ids += chunk
            text = self.text(prompt, ids)
            settled = text.rstrip("\ufffd")  # Bytes of a character that is still incomplete.
            if settled.startswith(shown):
                show(settled[len(shown) :])
                shown = settled
        show(text[len(shown) :] if text.startswith(shown) else f"\n{text}")
        return text

    @property
    def _engine(self) -> Engine:
        return Engine(self.policy.model, self.batch, self.policy.max_length)


def make_answerer(policy: LanguageModel, settings, rows: int) -> Answerer:
    """An `Answerer` with max_new_tokens, temperature, top_k and top_p of `settings`, for batches of at least `rows` answers.

    Raises:
      UserError: a prompt of one token leaves no space for max_new_tokens.
    """
    parts = policy.model.sharding.generation.batch_size
    sampling = section_sampling(settings, policy.stop_ids)
    if sampling.max_new_tokens >= policy.max_length:
        raise UserError(f"max_new_tokens is {sampling.max_new_tokens}, but the model has only {policy.max_length} positions "
                        "(prompt and answer); lower it")
    return Answerer(policy, sampling, -(-rows // parts) * parts)
