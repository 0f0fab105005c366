"""Time verdicts with and without shared prefixes: `python benchmarks/judge_prefix.py`.

A judge reads --pairs texts of --text tokens (a dialogue with two answers), each followed by one to eight questions of
--question tokens. `TextGenerator.next_logprobs` computes the log-probabilities of two options after each request; with
--reasoning, `TextGenerator.generate` samples that many tokens instead. Both ways, with and without `Engine.share_prefix`,
alternate for --rounds rounds after one that compiles. Seconds are medians; tokens are those that the model computes, without
padding. The weights are random.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from common import at_least, decoder, make_parser, median, progress, random_params, report, run_main, timed

from jaxalign.feedback.text_generator import TextGenerator
from jaxalign.models.model import Model
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling

PRINCIPLES = (1, 2, 4, 8)
OPTIONS = np.array([5, 6], np.int32)


def requests(options: argparse.Namespace, principles: int) -> list[list[int]]:
    """Return the token ids of every pair's text with each of its questions."""
    rng = np.random.default_rng(options.seed)

    def draw(count: int, length: int) -> list[list[int]]:
        return rng.integers(4, options.vocab, (count, length)).tolist()

    return [[*text, *question] for text in draw(options.pairs, options.text) for question in draw(principles, options.question)]


def measure(options: argparse.Namespace, generator: TextGenerator, principles: int) -> dict[str, float]:
    """Return the seconds and computed tokens of both ways."""
    prompts, seconds, tokens = requests(options, principles), {False: [], True: []}, {}
    for turn in range(options.rounds + 1):
        for share in (False, True) if turn % 2 else (True, False):
            work: list[int] = []
            own = dataclasses.replace(
                generator, engine=dataclasses.replace(generator.engine, share_prefix=share),
                counted=functools.partial(count, work),
            )
            taken, _ = timed(functools.partial(answer, options, own, prompts))
            tokens[share] = sum(work)
            if turn:
                seconds[share].append(taken)
    progress(f"{principles} principles: {seconds}")
    return {
        "principles": principles, "alone_s": median(seconds[False]), "shared_s": median(seconds[True]),
        "alone_tokens": tokens[False], "shared_tokens": tokens[True],
    }


def count(work: list[int], lengths: Sequence[int], tokens: int, heads: int, before: Sequence[int] = ()) -> None:
    """Append the number of computed tokens. See `jaxalign.feedback.text_generator.Counted`."""
    work.append(sum(lengths) - sum(before))


def answer(options: argparse.Namespace, generator: TextGenerator, prompts: list[list[int]]) -> None:
    """Compute the verdicts, or sample the reasoning."""
    if options.reasoning:
        generator.generate(prompts, jax.random.key(options.seed), Sampling(options.reasoning, ()), range(len(prompts)))
    else:
        generator.next_logprobs(prompts, OPTIONS)


class Numbers:
    """A tokenizer that writes ids as numbers."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__, "prompt", "new", "steps", layers=4, batch=32)
    parser.add_argument("--pairs", type=at_least(1), default=16, help="texts that the judge is asked about")
    parser.add_argument("--text", type=at_least(1), default=600, help="tokens of a dialogue with two answers")
    parser.add_argument("--question", type=at_least(1), default=40, help="tokens of a question")
    parser.add_argument("--reasoning", type=at_least(0), default=0, help="tokens to sample; 0: compute verdicts")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="timed rounds")
    options = parser.parse_args(argv)
    model = Model(decoder(options))
    engine = Engine(model, options.batch, options.text + options.question + max(1, options.reasoning))
    generator = TextGenerator(engine, random_params(model, options.seed), Numbers())
    rows = [measure(options, generator, principles) for principles in PRINCIPLES]
    lines = [f"{'principles':>10}  {'alone':>16}  {'shared':>16}"]
    for row in rows:
        alone, shared = (f"{row[f'{way}_s']:6.2f} s {row[f'{way}_tokens']:7d}" for way in ("alone", "shared"))
        lines.append(f"{row['principles']:10d}  {alone:>16}  {shared:>16}")
    return report(options, "judge_prefix", {"rows": rows}, lines)


if __name__ == "__main__":
    run_main(main)
