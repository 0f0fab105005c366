"""A language model as lm-evaluation-harness calls it (arXiv 2405.14782). Requires lm-eval (the extra "eval").

The requests, their tokens and their truncation are those of the harness's own Hugging Face backend, so that both give the same
numbers up to rounding.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jaxalign.data.chat.encoding import render
from jaxalign.data.chat.styles import require_style
from jaxalign.errors import UserError
from jaxalign.models.heads import gather_positions, greedy_tokens, response_positions
from jaxalign.models.language_model import LanguageModel, as_messages
from jaxalign.models.model import Model
from jaxalign.parallel import hosts
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.rollout.responses import BROKEN
from jaxalign.rollout.sampler import Engine, LocalSampler, respond
from jaxalign.rollout.sampling import Sampling

Scored = tuple[Any, list[int], list[int]]
"""A request as `TemplateLM` gives it: the texts, which may be None, the ids of the context and those of the continuation."""

NEW_TOKENS = 256
"""The maximum length of an answer, in tokens, if a task gives none; as in the Hugging Face backend."""
BATCH_TOKENS = 512
"""Longer rows than this are scored in smaller batches, so that a batch has about this many tokens for each of its rows."""
_LEAST_ROW, _LEAST_CONTINUATION = 32, 8
_NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "do_sample": None}
"""Generation options besides those of `Sampling`, and the value that changes nothing; any value of do_sample is read."""


class HarnessModel(TemplateLM):
    """A language model for `lm_eval.simple_evaluate(model=...)` and `lm_eval.evaluate(lm=...)`.

    In a run of several processes, each must make the same calls: all of them get all results.

    Args:
      policy: the language model.
      batch: the maximum number of rows that are scored or sampled together; rounded up to a multiple of the number of parts
        into which the mesh splits rows. Rows of more than `BATCH_TOKENS` tokens are scored in smaller batches.
      max_length: the maximum number of tokens that the model reads. Longer contexts lose their beginning.
      seed: the seed of sampled answers, for tasks with a temperature above 0.
      progress: whether to show progress bars on stderr.
    """

    def __init__(self, policy: LanguageModel, batch: int, max_length: int, seed: int, progress: bool):
        super().__init__()
        self.policy, self.max_length, self.max_gen_toks = policy, max_length, NEW_TOKENS
        self._parts = math.lcm(policy.model.sharding.batch_size, policy.model.sharding.generation.batch_size)
        self.batch_size = -(-batch // self._parts) * self._parts
        self._key, self._rows, self._progress = jax.random.key(seed), 0, progress and hosts.is_first()

    @property
    def eot_token_id(self) -> int:
        return self.policy.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: bos, or eos if the tokenizer has no bos."""
        bos = self.policy.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """The folder of the tokenizer, which identifies cached requests."""
        return str(self.policy.tokenizer.files.folder).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template of the tokenizer; None if it is not asked for."""
        return self.policy.tokenizer.files.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The dialogue as text: up to the beginning of the next answer or, without `add_generation_prompt`, up to the end of
        the last message, which the model continues.

        Raises:
          UserError: the tokenizer has no chat template, or it refuses the dialogue.
        """
        require_style(self.policy.tokenizer, "chat", "the style of a chat task")
        messages = as_messages(chat_history)
        if add_generation_prompt:
            return render(self.policy.tokenizer, messages, begin_answer=True)
        text, last = render(self.policy.tokenizer, messages), messages[-1].content.strip()
        return text[: text.rindex(last) + len(last)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text in which special tokens may be spelled out. Bos comes first, if the tokenizer adds it and the text
        does not begin with it; add_special_tokens False: never."""
        tokenizer = self.policy.tokenizer
        ids = tokenizer.encode_template(string).ids
        begins = add_special_tokens is None and has_bos_prefix(string, tokenizer.piece(self.prefix_token_id))
        return ids if add_special_tokens is False or begins else [*tokenizer.begin_ids, *ids]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(the log-probability of the continuation in nats, whether greedy decoding would write it) for each request."""
        return super().loglikelihood(requests, disable_tqdm or not self._progress)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, in nats. A text longer than the model reads is scored in windows."""
        windows, owner = [], []
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owner.append(index)
        totals = [0.0] * len(requests)
        for index, (logprob, _) in zip(owner, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[index] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: list[Scored], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(the log-probability of the continuation in nats, whether greedy decoding would write it) for each request.

        Raises:
          UserError: a continuation is empty or longer than the model reads, or the logits are not finite.
        """
        rows, results, cut = [], [(0.0, False)] * len(requests), 0
        for texts, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(f"the continuation {str(texts)[-60:]!r} has {len(continuation)} tokens; 1 to {self.max_length} "
                                "(max_length) are expected")
            row = [*context, *continuation]
            cut += len(row) > self.max_length + 1
            rows.append(row[-self.max_length - 1 :])
        _report_cut(cut, len(requests), self.max_length + 1)
        counts = [len(continuation) for _, _, continuation in requests]
        with tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm or not self._progress) as bar:
            for (T, N), index in self._batches(rows, counts):
                logprobs, agree = self._score([rows[i] for i in index], [counts[i] for i in index], T, N)
                for i, row_logprobs, row_agree in zip(index, logprobs, agree, strict=False):
                    results[i] = float(row_logprobs[: counts[i]].sum(dtype=np.float64)), bool(row_agree[: counts[i]].all())
                    if np.isnan(results[i][0]):
                        raise UserError(f"{BROKEN}: the weights are not finite, or the computation overflows")
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
                bar.update(len(index))
        return results

    def _batches(self, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """Yields ((T, N), indices of rows) for each batch, the longest first: T is the padded length of rows without their last
        token, N that of continuations. Powers of two keep the number of shapes low."""
        shapes: dict[tuple[int, int], list[int]] = {}
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            T = min(_power(len(row) - 1, _LEAST_ROW), self.max_length)
            shapes.setdefault((T, min(_power(count, _LEAST_CONTINUATION), T)), []).append(i)
        for (T, N), index in sorted(shapes.items(), reverse=True):
            size = min(self.batch_size, max(1, self.batch_size * BATCH_TOKENS // T // self._parts) * self._parts)
            for start in range(0, len(index), size):
                yield (T, N), index[start : start + size]

    def _score(
        self, rows: Sequence[Sequence[int]], counts: Sequence[int], T: int, N: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """`continuation_stats` of rows, on every process. The number of rows is padded to a power of two
        times the parts of the mesh, or to the batch size."""
        B = min(_power(-(-len(rows) // self._parts), 1) * self._parts, self.batch_size)
        tokens, targets, first = np.zeros((B, T), np.int32), np.zeros((B, N), np.int32), np.zeros(B, np.int32)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            tokens[i, : len(row) - 1], targets[i, :count], first[i] = row[:-1], row[-count:], len(row) - 1 - count
        model = self.policy.model
        arrays = place_rows(model.sharding, (tokens, first, targets))
        return fetch(continuation_stats(model, self.policy.weights, *arrays))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each request, up to the first of its texts `until`.

        Raises:
          UserError: a task has a generation option that is not supported, or asks for more tokens than the model can write.
        """
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        answers = [""] * len(requests)
        with tqdm(total=len(requests), desc="answers", disable=disable_tqdm or not self._progress) as bar:
            for index in groups.values():
                options = requests[index[0]].args[1]
                texts = self._generate([requests[i].args[0] for i in index], options, bar)
                for i, text in zip(index, texts, strict=True):
                    answers[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return answers

    def _generate(self, contexts: Sequence[str], options: Mapping[str, Any], bar: tqdm) -> list[str]:
        """The answers to contexts with the same generation options."""
        tokenizer, settings = self.policy.tokenizer, normalize_gen_kwargs(options, NEW_TOKENS)
        until = handle_stop_sequences(settings["until"], tokenizer.piece(self.eot_token_id))
        sampling = self._sampling(settings, until)
        room = self.max_length - sampling.max_new_tokens
        prompts = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
        _report_cut(sum(len(prompt) > room for prompt in prompts), len(prompts), room)
        engine = Engine(self.policy.model, self.batch_size, self.max_length)
        rows = range(self._rows, self._rows + len(prompts))
        self._rows += len(prompts)
        responses = respond(LocalSampler(engine, self.policy.weights), [prompt[-room:] for prompt in prompts], self._key, rows,
                            sampling, lambda ended: bar.update(len(ended)))
        broken = next((response.error for response in responses if response.error is not None), None)
        if broken is not None:
            raise UserError(f"a request of lm-eval has no answer: {broken}")
        return [postprocess_generated_text(tokenizer.decode(response.ids, spaces=True), until, None) for response in responses]

    def _sampling(self, settings: Mapping[str, Any], until: Sequence[str]) -> Sampling:
        """The sampling settings of normalised generation options. A token that contains one of the texts `until` ends an
        answer, so that the rest is not sampled."""
        known = ("until", "max_gen_toks", "temperature", "top_k", "top_p", *_NEUTRAL)
        other = next((name for name, value in settings.items() if name not in known or
                      (_NEUTRAL.get(name) is not None and value != _NEUTRAL[name])), None)
        if other is not None:
            raise UserError(f"a task of lm-eval has the generation option {other}={settings[other]!r}, which is not supported; "
                            "set generation_kwargs in a copy of the task's YAML file")
        if settings["max_gen_toks"] >= self.max_length:
            new = settings["max_gen_toks"]
            raise UserError(f"a task of lm-eval asks for {new} new tokens, but the maximum length of prompt plus answer "
                            f"is {self.max_length}; set generation_kwargs.max_gen_toks in a copy of the task's YAML file")
        ends = [i for i, text in enumerate(self._texts) if any(end in text for end in until if end)]
        return Sampling(
            settings["max_gen_toks"], tuple(dict.fromkeys((*self.policy.stop_ids, *ends))),
            float(settings.get("temperature") or 0.0), int(settings.get("top_k") or 0), float(settings.get("top_p") or 1.0),
        )

    @functools.cached_property
    def _texts(self) -> list[str]:
        """The text of each token by itself; "" if it is special."""
        tokenizer = self.policy.tokenizer
        return [tokenizer.decode([i], spaces=True) for i in range(min(tokenizer.vocab_size, self.policy.model.config.vocab))]


@functools.partial(MeshProgram, static_argnames=("model",))
def continuation_stats(model: Model, params, tokens, first, targets) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities float32 [B, N] of continuations, and whether each token is the most likely one, bool [B, N].

    Args:
      model: a model with an LM head.
      params: its parameters; with adapters, joined with the base.
      tokens: int32 [B, T], contexts and continuations without their last token.
      first: int32 [B], the position of the last token of each context.
      targets: int32 [B, N], the continuations. Results past the end of a continuation are arbitrary.
    """
    positions = response_positions(first, targets.shape[1])
    hidden = gather_positions(model.hidden(params, tokens), positions)
    weight, cap = model.head_weight(params, hidden.dtype), model.config.final_softcap
    greedy = greedy_tokens(hidden, weight, model.chunk_floats, cap, sharding=model.sharding)
    return model.token_stats(params, hidden, targets).logprobs, greedy == targets


def _power(count: int, least: int) -> int:
    """The smallest least * 2**n that is not below `count`."""
    return least << max(0, -(-count // least) - 1).bit_length()


def _report_cut(cut: int, total: int, room: int) -> None:
    if cut:
        logging.getLogger("jaxalign").warning(f"{cut} of {total} requests of lm-eval are longer than {room} tokens and lose "
                                              "their beginning")
