"""Tiny random `transformers` models with awkward sizes, their weights as a decoder's, and `peft` adapters on them."""

from __future__ import annotations

import functools
import pathlib
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from jaxalign.models.architecture import DecoderConfig  # noqa: E402
from jaxalign.models.families.base import Fields  # noqa: E402
from jaxalign.registry.families import FAMILIES, Family  # noqa: E402

_SIZES = dict(vocab_size=37, hidden_size=20, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
              max_position_embeddings=64, attn_implementation="eager")
_GROUPED = _SIZES | dict(num_key_value_heads=2, head_dim=6)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**_GROUPED),
    "gemma": lambda: transformers.GemmaConfig(**_GROUPED),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_SIZES, rotary_pct=0.4),
}
TOKENS = np.random.default_rng(1).integers(3, 37, (3, 11)).astype(np.int32)


def torch_model(kind: str, scalar: bool = False):
    """A random model, with random biases and norms as well. scalar: with a one-label head instead of the LM head."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    config.pad_token_id = 0
    if scalar:
        config.num_labels = 1
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.float().eval()


def family(kind: str) -> Family:
    return FAMILIES.get(kind)


def decoder_config(model) -> DecoderConfig:
    raw = model.config.to_dict()
    found = FAMILIES.get(raw["model_type"])
    return DecoderConfig(**found.load("decoder")(Fields(pathlib.Path("config.json"), raw)))


def _converted(value: np.ndarray, layout: str, pick: int, sizes: dict[str, int]) -> np.ndarray:
    left, right = layout.split(" -> ")
    letters = re.sub(r"[()]", "", left).split()
    value = value.reshape([sizes[x] for x in letters])
    if "n" in letters:
        value = value.take(pick, axis=letters.index("n"))
        letters.remove("n")
    return value.transpose([letters.index(x) for x in right.split()])


def params_of(model, head: str = "lm"):
    """The weights of a `transformers` model as the decoder's parameters, in float32 numpy arrays."""
    c, found = decoder_config(model), family(model.config.model_type)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    sizes = {"V": c.vocab, "D": c.embed, "H": c.heads, "K": c.kv_heads, "h": c.head_dim, "F": c.mlp, "n": 3}
    params: dict = {}
    for weight in found.load("weights")(c):
        if "{layer}" in weight.stored:
            stored = [state[weight.stored.format(layer=i)] for i in range(c.layers)]
            value = np.stack([_converted(x, weight.layout, weight.pick, sizes) for x in stored])
        else:
            value = _converted(state[weight.stored], weight.layout, weight.pick, sizes)
        place = params
        for part in weight.path[:-1]:
            place = place.setdefault(part, {})
        place[weight.path[-1]] = value
    if head == "scalar":
        params["score"] = state["score.weight"][0]
    elif not c.tie_embeddings:
        params["unembedding"] = model.get_output_embeddings().weight.detach().numpy().T  # Its name differs from the files'.
    return params


def randomised(model, seed: int = 0):
    """The given `peft` model with random adapter weights, so that the adapters have an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                if "magnitude" in name:
                    parameter.mul_(1 + 0.2 * noise)
                else:
                    parameter.copy_(0.3 * noise)
            elif "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval()


@functools.cache
def adapted(kind: str, scalar: bool = False, **changes):
    """A tiny model with random adapters of rank 3 and alpha 5 on all its linear layers, modified by `changes`."""
    settings = dict(r=3, lora_alpha=5, target_modules="all-linear", task_type="SEQ_CLS" if scalar else "CAUSAL_LM")
    changes = {name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()}
    return randomised(peft.get_peft_model(torch_model(kind, scalar), peft.LoraConfig(**settings | changes)))


def logits(model, tokens=TOKENS) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens, dtype=torch.long)).logits.numpy()
