"""Time direct preference optimisation on ragged pairs: `python benchmarks/dpo.py`.

    python benchmarks/dpo.py --data pairs.jsonl.gz --tokenizer tokenizer.model --vs trl --peer-python PYTHON

As in the stage, the reference's log-probs of the answers are computed once, followed by steps of --batch pairs with AdamW. The
time of a step includes its share of both, reported separately as `update_s` and `reference_s`. A peer gets the same pairs in
the same batches.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ragged
from common import (
    WARM_UP,
    Compilations,
    adamw,
    decoder,
    make_parser,
    parameter_count,
    progress,
    random_params,
    report,
    run_main,
    timed,
)
from versus import add_flags, compare, table

from jaxalign.config import DPOConfig
from jaxalign.data.loader import EpochLoader, take
from jaxalign.models.model import Model
from jaxalign.steps.arguments import DirectArguments
from jaxalign.steps.direct_step import direct_step
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.state import init_state
from jaxalign.trainers.answers import all_logprobs, packed, pair_arrays

FLAGS = ("layers", "dim", "heads", "ffn", "vocab", "batch", "length", "steps")


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__, length=(512, "maximum tokens of a dialogue with its answer"), batch=8, steps=10)
    parser.add_argument("--micro-batch-tokens", type=int, default=0, help="as in the config; 0: automatic")
    ragged.add_flags(parser)
    add_flags(parser, trl="trl_dpo.py")
    options = parser.parse_args(argv)
    texts = ragged.read(options, options.length)
    section = DPOConfig(
        batch=options.batch, max_length=options.length, optimizer=adamw(), micro_batch_tokens=options.micro_batch_tokens
    )
    pairs = pair_arrays(texts.tokenizer, texts.pairs, ragged.STYLE, section)
    loader = EpochLoader(len(pairs.label), options.batch, options.seed)
    order = np.concatenate([loader.indices(step) for step in range(WARM_UP + options.steps)])
    pairs, later = take(pairs, order), np.arange(WARM_UP * options.batch, len(order))
    model, optimizer = Model(decoder(options)), make_optimizer(section.optimizer, 10**6)
    start = random_params(model, 1)
    state = init_state(model, optimizer, jax.tree.map(lambda x: x.copy(), start), jax.random.key(options.seed))
    compilations = Compilations()

    def reference(index: np.ndarray) -> float:
        nonlocal pairs
        seconds, found = timed(lambda: all_logprobs(section, model, start, take(pairs, index)))
        whole = np.array(pairs.reference)
        whole[index] = found
        pairs = dataclasses.replace(pairs, reference=whole)
        return seconds / (len(index) / options.batch)

    def step(number: int) -> float:
        nonlocal state
        index = np.arange(number * options.batch, (number + 1) * options.batch)

        def update():
            batch, parts = packed(section, model, pairs, index)
            given = DirectArguments(model=model, optimizer=optimizer, section=section, batch=batch, packed=parts)
            return direct_step(state, given)

        seconds, (state, _) = timed(update)
        return seconds

    def ours() -> dict[str, Any]:
        before, first = compilations.count, reference(later)
        updates = [step(WARM_UP + number) for number in range(options.steps)]
        return {"step_s": [first + update for update in updates], "update_s": updates, "reference_s": first,
                "compiled": compilations.count - before}

    progress(f"warm-up: reference {reference(np.arange(len(order))):.3f} s a step")
    for number in range(WARM_UP + options.steps):  # Batches of other lengths may need other programs.
        progress(f"warm-up {number + 1}: {step(number):.3f} s")
    with tempfile.TemporaryDirectory() as folder:
        path = ragged.write_ids(Path(folder) / "pairs.jsonl", [_ids(pairs, row) for row in range(len(order))])
        found = compare(options, ours, "mean", FLAGS, ("--data", str(path)))
    found |= {"parameters": parameter_count(model), "source": texts.source, "tokens": int(pairs.length[later].sum()),
              "padded_to": int(np.prod(pairs.tokens[later].shape))}
    return report(options, "dpo", found, table(found, options.vs))


def _ids(pairs, row: int) -> dict[str, list[int]]:
    """Return a pair in the peer's format."""
    sides = {}
    for name, side in (("chosen", 0), ("rejected", 1)):
        start, end = pairs.prompt_length[row, side], pairs.length[row, side]
        sides["prompt"] = pairs.tokens[row, side, :start].tolist()
        sides[name] = pairs.tokens[row, side, start:end].tolist()
    return sides


if __name__ == "__main__":
    run_main(main)
