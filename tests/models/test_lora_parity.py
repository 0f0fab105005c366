"""Adapters equal those of `peft` on `transformers` models: logits, and gradients of the trained parameters."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import hugging, tiny

torch = hugging.torch

from jaxalign.models.adapters.lora import LINEAR, LoraAdapters, join  # noqa: E402
from jaxalign.models.model import Model  # noqa: E402

pytestmark = pytest.mark.parity

VARIANTS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
NAMES = {theirs: key for key, (_, theirs) in LINEAR.items()}


def adapters_of(model, decoder, read):
    """Apply `read` to each of peft's weights and return our tree. Shapes by hand: peft has [r, in] and [out, r]."""
    c = decoder
    outs = {"query": (c.heads, c.head_dim), "key": (c.kv_heads, c.head_dim), "value": (c.kv_heads, c.head_dim)}
    ins = {"out": (c.heads, c.head_dim)}
    tree: dict = {}
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            continue
        (part, leaf), kind = NAMES[name.split(".lora_")[0].rpartition(".")[2]], name.split(".lora_")[1][0]
        value = read(parameter).detach().numpy()
        if kind == "A":
            key, value = "a", value.T.reshape(*ins.get(leaf, (-1,)), value.shape[0])
        elif kind == "B":
            key, value = "b", value.T.reshape(value.shape[1], *outs.get(leaf, (-1,)))
        else:
            key, value = "magnitude", value.reshape(outs.get(leaf, (-1,)))
        tree.setdefault(part, {}).setdefault(leaf, {}).setdefault(key, []).append(value)
    return jax.tree.map(np.stack, tree, is_leaf=lambda x: isinstance(x, list))


@pytest.mark.variants(3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_logits_and_gradients_equal_pefts(kind, variant):
    changes = VARIANTS[variant]
    theirs = hugging.adapted(kind, **changes)
    config = hugging.decoder_config(theirs)
    lora = LoraAdapters(3, 5.0, ("*",), changes.get("use_rslora", False), changes.get("use_dora", False))
    model, base = Model(config, lora=lora), hugging.params_of(hugging.torch_model(kind))
    own = {"adapters": adapters_of(theirs, config, lambda p: p)}
    targets = hugging.TOKENS[:, 1:]

    def loss(own):
        params = join(base, own)
        logits = tiny.all_logits(model, params, hugging.TOKENS)
        logprobs = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logprobs, targets[..., None], -1)), logits

    (found, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(own)
    tokens = torch.tensor(hugging.TOKENS, dtype=torch.long)
    theirs.zero_grad()
    expected = theirs(input_ids=tokens).logits
    value = torch.nn.functional.cross_entropy(expected[:, :-1].reshape(-1, 37), tokens[:, 1:].reshape(-1))
    value.backward()
    expected = expected.detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())
    assert float(found) == pytest.approx(float(value), rel=1e-5)
    expected = {"adapters": adapters_of(theirs, config, lambda p: p.grad)}
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    chex.assert_trees_all_close(gradients, expected, rtol=1e-4, atol=1e-5 * largest)
