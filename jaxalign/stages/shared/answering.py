"""Samples several answers to each prompt with the policy that a stage starts from, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax

from jaxalign.data.chat import styles
from jaxalign.data.sources.base import PromptSets
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.models.model import Model
from jaxalign.records import Prompt, Rollout
from jaxalign.rollout.sampler import Engine, make_sampler, sample_rollout
from jaxalign.stages.shared import engines, run_models, sources
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.shards import Queue, Shards, queues
from jaxalign.steps import work
from jaxalign.tracking.progress import Progress


def sampled_answers(
    context: StageContext, stage: str, policy: Model, tokenizer: Tokenizer, sets: PromptSets, shards: Shards, n: int,
    key: jax.Array, timing: engines.Timing,
) -> Iterator[tuple[Queue, list[Prompt], Rollout]]:
    """Yields (queue, its prompts, n answers to each) for every queue of RL prompts with a chunk that is not written yet.

    Args:
      context: the stage's context.
      stage: the stage's name; its config section has prompts, batch and the sampling fields.
      policy: the policy's architecture; weights are read only if a chunk is missing.
      tokenizer: encodes the prompts.
      sets: the prompts of the data source.
      shards: the files of the chunks, which the caller writes.
      n: the number of answers to each prompt. Rows [i * n, (i + 1) * n) of the rollout answer the i-th prompt of the queue.
      key: the PRNG key of the samples.
      timing: records the phase "generate".
    """
    config, section = context.config, getattr(context.config, stage)
    prompts = sources.prompts(context, tokenizer, "rl", section.prompts, section.max_new_tokens, sets)
    left = shards.unfinished(queues(len(prompts), section.batch // n))
    done = len(prompts) - sum(len(queue.rows) for queue in left)
    with Progress(context.title, len(prompts), done, unit="prompt") as progress:
        if not left:
            return
        sampling = engines.sampling(section, tokenizer, config.data.style)
        engine = Engine(policy, section.batch, config.model.max_length)
        sampler = make_sampler(config.sampler, engine, "config.sampler")
        sampler.update(run_models.policy_params(context, policy, stage), 0)
        on_finished = engines.counting(progress)
        for queue in left:
            rows, own = queue.rows, [prompts[i] for i in queue.rows]
            ids = [styles.encode_prompt(tokenizer, p.messages, config.data.style) for p in own for _ in range(n)]
            with timing.phase("generate") as phase:
                numbers = range(rows.start * n, rows.stop * n)
                rollout = sample_rollout(sampler, engine.padding, ids, key, numbers, sampling, on_finished, versions=False)
                phase.tokens, phase.flops = work.sampled(policy, rollout)
            yield queue, own, rollout
            progress.update(len(rows))


class SampledAnswer(NamedTuple):
    """The answer in a sampled text.

    text: the answer. ended: whether it ended. cut: whether the text went on with another turn, which is not part of the answer.
    emptied: whether the text has words, but none of them are the answer's.
    """

    text: str
    ended: bool
    cut: bool
    emptied: bool


def answers_in(tokenizer: Tokenizer, rollout: Rollout, style: str) -> list[SampledAnswer]:
    """The answer of every row of a rollout (numpy arrays), without another turn or thoughts; see `styles.finish_answer`."""
    whole, found = styles.response_texts(tokenizer, rollout), []
    for before, (text, ended) in zip(whole, styles.answers_of(tokenizer, rollout, style), strict=True):
        emptied = bool(before.strip()) and not text.strip()
        found.append(SampledAnswer(text, ended, style == "hh" and text != before, emptied))
    return found
