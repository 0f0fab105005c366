"""Text generation from Python: `jaxalign.Sampler`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxalign.config.arguments import SEED, instance_of
from jaxalign.config.constraints import at_least, between
from jaxalign.config.schema import checked
from jaxalign.data.chat.styles import naming
from jaxalign.errors import UserError
from jaxalign.models.language_model import Asked, LanguageModel
from jaxalign.records import Rollout
from jaxalign.rollout.responses import Response
from jaxalign.rollout.sampler import Engine, LocalSampler, TokenSampler, make_sampler, respond, sample_rollout
from jaxalign.rollout.sampling import Sampling
from jaxalign.rollout.stops import checked_stops, cut_response, response_text

MOST_ANSWERS = 1_000_000
"""The maximum number of answers of one call, which are all in memory at its end."""
_MODEL = "a language model from load_model"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sampled answer.

    Attributes:
      text: its text, without the stop token or the stop text.
      ids: its token ids, including the stop token or those that complete a stop text.
      logprobs: float32 [N], the log-probability of each token at the sampling temperature, before top-k and top-p.
      ended: True if a stop token or a stop text ended it; otherwise it reached max_new_tokens.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: np.ndarray
    ended: bool


@dataclasses.dataclass(frozen=True)
class Samples:
    """Sampled answers in the order of the prompts; the n answers to a prompt are consecutive."""

    samples: tuple[Sample, ...]

    @property
    def texts(self) -> list[str]:
        """The text of each answer."""
        return [sample.text for sample in self.samples]

    @property
    def ids(self) -> list[tuple[int, ...]]:
        """The token ids of each answer."""
        return [sample.ids for sample in self.samples]

    @property
    def logprobs(self) -> list[np.ndarray]:
        """The log-probabilities of each answer's tokens, float32 [N]."""
        return [sample.logprobs for sample in self.samples]

    @property
    def ended(self) -> list[bool]:
        """Whether a stop token or a stop text ended each answer."""
        return [sample.ended for sample in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


class Sampler:
    """Samples answers from a language model.

    Equal seeds give equal answers on any mesh and with any batch size. Each call of `generate` draws new answers. Calls from
    several threads run one after another.

    Args:
      policy: the language model.
      temperature: the sampling temperature; 0 is greedy.
      top_k: sample from the k most likely tokens; 0: from all.
      top_p: sample from the smallest set of tokens with at least this probability.
      batch: the maximum number of answers that are sampled together.
      seed: the seed of all answers.
      sampler: "local", a registered name, "package.module:name", or a `jaxalign.rollout.sampler.TokenSampler`.

    Raises:
      UserError: a value is out of range.
    """

    def __init__(
        self, policy: LanguageModel, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, batch: int = 64,
        seed: int = 0, sampler: str | TokenSampler | Callable[[Engine], TokenSampler] = "local",
    ):
        instance_of(policy, LanguageModel, "policy", _MODEL)
        batch, seed = checked(batch, int, "batch", between(1, MOST_ANSWERS)), checked(seed, int, "seed", SEED)
        self._parts = policy.model.sharding.generation.batch_size
        self._policy, self._temperature, self._top_k, self._top_p = policy, temperature, top_k, top_p
        Sampling(1, policy.stop_ids, temperature, top_k, top_p)  # Raise for a value out of range.
        self._engine = Engine(policy.model, -(-batch // self._parts) * self._parts, policy.max_length)
        self._key, self._calls, self._version = jax.random.key(seed), 0, 0
        self._sampler = make_sampler(sampler, self._engine)
        self._sampler.update(policy.weights, 0)
        self._lock = threading.RLock()  # Calls from several threads would mix their rows.

    @property
    def policy(self) -> LanguageModel:
        """The language model with the sampler's current weights."""
        return self._policy

    def update(self, policy: LanguageModel) -> None:
        """Uses the weights of another language model with the same architecture from now on."""
        if instance_of(policy, LanguageModel, "policy", _MODEL).model != self._policy.model:
            raise UserError("the new policy's architecture or mesh differs from the sampler's; create a new Sampler")
        with self._lock:
            self._policy, self._version = policy, self._version + 1
            self._sampler.update(policy.weights, self._version)

    def generate(
        self, prompts: Sequence[Asked], max_new_tokens: int = 64, n: int = 1, stop: Sequence[str] = ()
    ) -> Samples:
        """Samples n answers to each prompt.

        Args:
          prompts: each a text, a list of {"role", "content"}, a `Prompt`, or {"prompt": a text or a list}.
          max_new_tokens: the maximum length of an answer, in tokens.
          n: the number of answers to each prompt; one call samples at most `MOST_ANSWERS` (1,000,000) answers.
          stop: texts that end an answer. Its text ends before the first of them, its tokens include the one that completes it,
            and `ended` is True. Answers are cut after they are sampled, so stop texts save no time.

        Raises:
          UserError: there are no prompts, one cannot be answered (empty, or too long for the model), or there are too many
            answers.
        """
        stop = checked_stops(stop, "stop")
        with self._lock:
            ids, sampling, key = self._request(prompts, max_new_tokens, n)
            responses = respond(self._sampler, ids, key, range(len(ids)), sampling)
        samples = []
        for index, (prompt, response) in enumerate(zip(ids, responses, strict=True)):
            if response.error is not None:
                raise UserError(f"prompts[{index // n}] has no answer: {response.error}")
            samples.append(self._sample(prompt, response, stop))
        return Samples(tuple(samples))

    def _sample(self, prompt: Sequence[int], response: Response, stop: Sequence[str]) -> Sample:
        """The answer of a response, which ends at the first of the texts `stop`, if it has one."""
        def decode(ids: Sequence[int]) -> str:
            return self._policy.text(ids, prompt)

        own = cut_response(response, stop, decode)
        return Sample(response_text(own, decode), own.ids, np.asarray(own.logprobs, np.float32), own.ended)

    def rollout(self, prompts: Sequence[Asked], max_new_tokens: int = 64, n: int = 1) -> Rollout:
        """Samples like `generate` and returns arrays, for a custom training loop.

        Returns:
          A `Rollout` of numpy arrays with n consecutive rows for each prompt, in the order of the prompts. On a mesh the rows
          are padded to a multiple of the size of its batch axes; padding rows have length 0.
        """
        padding = dataclasses.replace(self._engine.padding, batch=self._parts)
        with self._lock:
            ids, sampling, key = self._request(prompts, max_new_tokens, n)
            return sample_rollout(self._sampler, padding, ids, key, range(len(ids)), sampling)

    def _request(self, prompts: Sequence[Asked], max_new_tokens: int, n: int) -> tuple[list[list[int]], Sampling, jax.Array]:
        """The token ids of each row's prompt, the settings, and the key of the next call."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
            raise UserError(f"prompts is {str(prompts)[:60]!r}; a list of at least one prompt is expected")
        n, most = checked(n, int, "n", at_least(1)), MOST_ANSWERS // len(prompts)
        if n > most:
            raise UserError(f"n is {n:,} for {len(prompts):,} prompts; one call samples at most {MOST_ANSWERS:,} answers: "
                            "sample fewer in each of several calls")
        sampling = Sampling(max_new_tokens, self._policy.stop_ids, self._temperature, self._top_k, self._top_p)
        if sampling.max_new_tokens >= self._policy.max_length:
            raise UserError(f"max_new_tokens is {max_new_tokens}; a number below {self._policy.max_length}, the model's "
                            "maximum length of prompt plus response, is expected")
        ids = []
        for number, prompt in enumerate(prompts):
            with naming(f"prompts[{number}]"):
                ids += [self._policy.prompt_ids(prompt)] * n
        self._calls += 1
        return ids, sampling, jax.random.fold_in(self._key, self._calls - 1)


def say(
    sampler: LocalSampler, policy: LanguageModel, prompt: Sequence[int], key: jax.Array, row: int, sampling: Sampling,
    show: Callable[[str], None],
) -> str:
    """Samples one answer, shows it while it is written, and returns its text.

    Args:
      sampler: a sampler without unfinished rows.
      policy: decodes the answer.
      prompt: token ids.
      key: a PRNG key.
      row: the global row number of the answer.
      sampling: the sampling settings.
      show: called with each new piece of the text once no later token can change it.

    Raises:
      UserError: the prompt cannot be answered.
    """
    sampler.submit([prompt], [row], key, sampling)
    shown = text = ""
    while sampler.unfinished:
        ended = sampler.collect()
        ids = sampler.written(row)
        for _, response in ended:
            if response.error is not None:
                raise UserError(response.error)
            ids = response.ids[:-1] if response.ended else response.ids
        text = policy.text(ids, prompt)
        settled = text.rstrip("\ufffd")  # Bytes of a character that is still incomplete.
        if settled.startswith(shown):
            show(settled[len(shown) :])
            shown = settled
    show(text[len(shown) :] if text.startswith(shown) else f"\n{text}")
    return text
