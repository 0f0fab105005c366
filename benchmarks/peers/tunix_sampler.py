"""tunix's sampler on a queue of random prompts, in batches; each samples until it ends or has --new tokens."""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate import sampler as tunix_sampler
from tunix.models.llama3 import model as llama

INTEGERS = {
    "layers": 6, "dim": 256, "heads": 8, "ffn": 688, "vocab": 64, "batch": 64, "prompt": 32, "new": 256,
    "queue": 512, "steps": 3,
}


class Numbers:
    """A tokenizer whose text is numbers."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0

    def dedup_bos_ids(self, ids):
        return ids

    def apply_chat_template(self, *_, **__):
        raise NotImplementedError


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in INTEGERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    config = llama.ModelConfig(
        num_layers=options.layers, vocab_size=options.vocab, embed_dim=options.dim, hidden_dim=options.ffn,
        num_heads=options.heads, head_dim=options.dim // options.heads, num_kv_heads=options.heads, rope_theta=10000,
        norm_eps=1e-5, weight_tying=True,
    )
    graph, state = nnx.split(llama.Llama3(config, rngs=nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [
        0.02 * jax.random.normal(key, leaf.shape, leaf.dtype) if leaf.ndim > 1 else jnp.ones_like(leaf)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    size = options.prompt + options.new + 8
    cache = tunix_sampler.CacheConfig(size, options.layers, options.heads, options.dim // options.heads)
    sampler = tunix_sampler.Sampler(model, Numbers(), cache)
    rng = np.random.default_rng(0)
    # One token fewer, because the sampler adds bos.
    prompts = [" ".join(map(str, row)) for row in rng.integers(4, options.vocab, (options.queue, options.prompt - 1))]
    step_s, tokens = [], []
    for step in range(options.steps):
        began, count = time.perf_counter(), 0
        for start in range(0, options.queue, options.batch):
            out = sampler(
                prompts[start : start + options.batch], max_generation_steps=options.new, max_prompt_length=options.prompt,
                temperature=1.0, top_p=1.0, seed=step * options.queue + start, eos_tokens=[2],
            )
            for row in out.tokens:
                row = np.asarray(row).tolist()
                count += row.index(2) + 1 if 2 in row else len(row)
        step_s.append(time.perf_counter() - began)
        tokens.append(count)
    print(json.dumps({"engine": "tunix", "step_s": step_s, "tokens": tokens}))


main()
