"""Time supervised fine-tuning on packed ragged text: `python benchmarks/sft.py`.

    python benchmarks/sft.py --data instruction-data-with-preference.json --tokenizer tokenizer.model \\
        --vs trl --peer-python PYTHON

`lm_step` with AdamW on rows that `data.packing.pack` filled, --batch rows of --length tokens per step, as in the stage; the
loss covers the answers. The result is the time per token of text, without padding, over the same documents.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import ragged
from common import (
    WARM_UP,
    Compilations,
    adamw,
    decoder,
    make_parser,
    parameter_count,
    product_weights,
    progress,
    random_params,
    report,
    run_main,
    timed,
)
from versus import add_flags, compare, table

from jaxalign.data.loader import EpochLoader
from jaxalign.data.packing import completion, pack
from jaxalign.models.model import Model
from jaxalign.parallel.rows import place_rows
from jaxalign.steps.arguments import LmArguments
from jaxalign.steps.lm_step import lm_step
from jaxalign.steps.microbatch import chosen
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.state import init_state

FLAGS = ("layers", "dim", "heads", "ffn", "vocab", "batch", "length", "steps")


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__, length=(512, "tokens per packed row"), batch=8, steps=10)
    parser.add_argument("--micro-batches", type=int, default=0, help="micro-batches per step; 0: as in the stage")
    ragged.add_flags(parser)
    add_flags(parser, trl="trl_sft.py")
    options = parser.parse_args(argv)
    texts = ragged.read(options, options.length)
    documents = [completion(texts.prompt_ids(pair), texts.answer_ids(pair.response_a)) for pair in texts.pairs]
    cut = sum(len(ids) > options.length for ids, _ in documents)
    # The peers also train on rows that lose their whole answer, so those stay.
    rows, _ = pack([(ids[: options.length], weights[: options.length]) for ids, weights in documents], options.length)
    loader = EpochLoader(len(rows.tokens), options.batch, options.seed)
    model, optimizer = Model(decoder(options)), make_optimizer(adamw(), 10**6)
    state = init_state(model, optimizer, random_params(model, 1), jax.random.key(options.seed))
    parts = chosen(options.micro_batches, options.batch, options.length, model.sharding)
    compilations, number = Compilations(), 0

    def step() -> tuple[float, int]:
        nonlocal state, number
        batch = loader.indices(number)
        placed = place_rows(model.sharding, rows, batch)
        given = LmArguments(model=model, optimizer=optimizer, micro_batches=parts, batch=placed)
        seconds, (state, metrics) = timed(functools.partial(lm_step, state, given))
        number += 1
        return seconds, int(metrics.tokens)

    def ours() -> dict[str, Any]:
        before = compilations.count
        seconds, tokens = zip(*(step() for _ in range(options.steps)), strict=True)
        return {"step_s": list(seconds), "tokens": list(tokens), "compiled": compilations.count - before}

    for count in range(WARM_UP):
        progress(f"warm-up {count + 1}: {step()[0]:.3f} s")
    with tempfile.TemporaryDirectory() as folder:
        records = [{"ids": ids, "weights": weights} for ids, weights in documents]
        path = ragged.write_ids(Path(folder) / "documents.jsonl", records)
        found = compare(options, ours, "token", FLAGS, ("--data", str(path)))
    filled = float((rows.segment_ids > 0).mean())
    rate = 6 * product_weights(options) / found["ours_s"]  # LM head at all tokens; no attention, no recomputation.
    found |= {"parameters": parameter_count(model), "flops_per_s": rate, "tokens_per_s": 1 / found["ours_s"],
              "filled": filled, "cut": cut, "documents": len(documents), "source": texts.source}
    return report(options, "sft", found, table(found, options.vs))


if __name__ == "__main__":
    run_main(main)
