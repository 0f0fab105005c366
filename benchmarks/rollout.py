"""Time a queue of prompts with a fixed number of slots: `python benchmarks/rollout.py`.

    python benchmarks/rollout.py --vs hf --peer-python PYTHON
    python benchmarks/rollout.py --vs tunix --peer-python PYTHON

`LocalSampler` over --queue random prompts with --batch slots at temperature 1, from random weights; a response ends at --stop
(with 64 tokens an untrained model draws it after 63 on average) or after --new tokens. A step is the whole queue, each with new
random numbers; the result is the time per new token. The peers answer the queue in batches of --batch. TRL samples with Hugging
Face's generate, so --vs trl equals --vs hf.
"""

from __future__ import annotations

from typing import Any

import jax
from common import (
    Compilations,
    at_least,
    decoder,
    make_parser,
    parameter_count,
    progress,
    random_params,
    random_prompts,
    report,
    run_main,
    timed,
)
from versus import add_flags, compare, table
from warm_up import warm_up

from jaxalign.models.model import Model
from jaxalign.rollout.sampler import Engine, LocalSampler, respond
from jaxalign.rollout.sampling import Sampling

FLAGS = ("layers", "dim", "heads", "ffn", "vocab", "batch", "prompt", "new", "steps", "queue")


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__, vocab=64, new=256, steps=1)
    parser.add_argument("--queue", type=at_least(1), default=512, help="prompts per step")
    parser.add_argument("--stop", type=int, default=2, help="the token that ends a response; the peers' is 2")
    add_flags(parser, tunix="tunix_sampler.py", hf="hf_generate.py", trl="hf_generate.py")
    options = parser.parse_args(argv)
    model = Model(decoder(options))
    params, prompts = random_params(model, 1), random_prompts(options, options.queue)
    engine = Engine(model, options.batch, options.prompt + options.new)
    sampling, compilations, key = Sampling(options.new, (options.stop,)), Compilations(), jax.random.key(options.seed)
    sampler, done = LocalSampler(engine, params), 0

    def queue() -> tuple[float, int]:
        nonlocal done
        rows = range(done * options.queue, (done + 1) * options.queue)
        done += 1
        seconds, responses = timed(lambda: respond(sampler, prompts, key, rows, sampling))
        return seconds, sum(len(response.ids) for response in responses)

    def ours() -> dict[str, Any]:
        before = compilations.count
        seconds, tokens = zip(*(queue() for _ in range(options.steps)), strict=True)
        return {"step_s": list(seconds), "tokens": list(tokens), "compiled": compilations.count - before}

    warm_up(engine, params, sampling, options.prompt)
    for number in range(2):
        progress(f"warm-up {number + 1}: {queue()[0]:.3f} s")
    found = compare(options, ours, "token", FLAGS, warm_up=1)  # The second batch of a peer is already warm.
    peer = "HF generate, as TRL samples" if options.vs == "trl" and options.peer_script is None else options.vs
    found |= {"parameters": parameter_count(model), "new_tokens_per_s": 1 / found["ours_s"], "peer": peer}
    return report(options, "rollout", found, table(found, peer))


if __name__ == "__main__":
    run_main(main)
