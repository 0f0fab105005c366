"""Time the training of a preference model on ragged pairs: `python benchmarks/preference.py`.

    python benchmarks/preference.py --data pairs.jsonl.gz --tokenizer tokenizer.model --vs trl --peer-python PYTHON

`preference_step` with AdamW on --batch pairs per step, as in the stage. A peer gets the same pairs in the same batches.
"""

from __future__ import annotations

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

from jaxalign.data.loader import EpochLoader, take
from jaxalign.models.model import Model
from jaxalign.steps.arguments import PreferenceArguments
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.preference_step import preference_step
from jaxalign.steps.state import init_state
from jaxalign.trainers.scoring import packed, pair_arrays

FLAGS = ("layers", "dim", "heads", "ffn", "vocab", "batch", "length", "steps")


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__, length=(512, "maximum tokens of a dialogue with its answer"), batch=8, steps=10)
    parser.add_argument("--micro-batch-tokens", type=int, default=0, help="as in the config; 0: automatic")
    ragged.add_flags(parser)
    add_flags(parser, trl="trl_reward.py")
    options = parser.parse_args(argv)
    texts = ragged.read(options, options.length)
    pairs = pair_arrays(texts.tokenizer, texts.pairs, ragged.STYLE, options.length)
    loader = EpochLoader(len(pairs.label), options.batch, options.seed)
    pairs = take(pairs, np.concatenate([loader.indices(step) for step in range(WARM_UP + options.steps)]))
    model, optimizer = Model(decoder(options), "scalar"), make_optimizer(adamw(), 10**6)
    state = init_state(model, optimizer, random_params(model, 1), jax.random.key(options.seed))
    compilations = Compilations()

    def step(number: int) -> float:
        nonlocal state
        index = np.arange(number * options.batch, (number + 1) * options.batch)

        def update():
            batch, parts = packed(model, pairs, index, options.micro_batch_tokens)
            given = PreferenceArguments(model=model, optimizer=optimizer, centering_coef=0.0, batch=batch, packed=parts)
            return preference_step(state, given)

        seconds, (state, _) = timed(update)
        return seconds

    def ours() -> dict[str, Any]:
        before = compilations.count
        seconds = [step(WARM_UP + number) for number in range(options.steps)]
        return {"step_s": seconds, "compiled": compilations.count - before}

    for number in range(WARM_UP + options.steps):  # Batches of other lengths may need other programs.
        progress(f"warm-up {number + 1}: {step(number):.3f} s")
    with tempfile.TemporaryDirectory() as folder:
        sides = (("chosen", 0), ("rejected", 1))
        records = [
            {name: pairs.tokens[row, side, : pairs.length[row, side]].tolist() for name, side in sides}
            for row in range(len(pairs.label))
        ]
        path = ragged.write_ids(Path(folder) / "pairs.jsonl", records)
        found = compare(options, ours, "mean", FLAGS, ("--data", str(path)))
    found |= {"parameters": parameter_count(model), "source": texts.source}
    return report(options, "preference", found, table(found, options.vs))


if __name__ == "__main__":
    run_main(main)
