"""Runs jaxalign on the devices at hand: a tiny PPO run with its step-0 checks, and the rate of matrix products.

Weights, prompts and tokenizer are made here; nothing is read or downloaded.
"""

from __future__ import annotations

import logging
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.config import Mesh
from jaxalign.data.tokenizers import chatml
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.diagnosis.findings import Finding
from jaxalign.errors import UserError
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import make_sharding
from jaxalign.rl.checks import Check
from jaxalign.trainers.ppo import PPO

PROMPTS = ("Once upon a time", "In a village by the sea", "The dog", "A long road")
ITERATIONS = 3
_MAX_LENGTH, _NEW_TOKENS, _BATCH = 64, 16, 8
_LARGEST_SPLIT = _BATCH  # The batch of 8 rows can be split over at most 8 devices.
_PRODUCT = {"cpu": 1024}
_PRODUCT_ELSEWHERE = 8192
"""The rows of the square matrices whose product is timed."""


class SelfTest(NamedTuple):
    """The result of one PPO run.

    Attributes:
      checks: the step-0 checks.
      losses: the policy's loss of every iteration.
      first: seconds of the first iteration, with compilation.
      later: the median of the seconds of the other iterations.
    """

    checks: tuple[Check, ...]
    losses: tuple[float, ...]
    first: float
    later: float


def self_test() -> Iterator[Finding]:
    """Runs PPO on one device and, if there are several, on all of them (at most 8), and times products."""
    count = len(jax.local_devices())
    meshes = {"self-test, one device": Mesh()}
    if count > 1:
        split = min(1 << count.bit_length() - 1, _LARGEST_SPLIT)  # the largest power of two
        meshes[f"self-test, fsdp={split}"] = Mesh(fsdp=split)
    for topic, mesh in meshes.items():
        try:
            yield from findings_of(topic, run_ppo(mesh))
        except (UserError, RuntimeError) as error:  # XLA's errors are RuntimeErrors.
            yield Finding(topic, "problem", f"PPO of a tiny model failed: {str(error).strip().splitlines()[0]}")
    for dtype in (jnp.float32, jnp.bfloat16):
        rate, size = product_rate(dtype), _product_size()
        yield Finding("products", "ok", f"{rate / 1e12:.3g} TFLOP/s in {jnp.dtype(dtype).name}, [{size}, {size}] x "
                      f"[{size}, {size}] on one device")


def findings_of(topic: str, result: SelfTest) -> Iterator[Finding]:
    """The findings of one PPO run: its losses, and each check with its value and tolerance."""
    finite = all(map(math.isfinite, result.losses))
    text = (f"{ITERATIONS} PPO iterations, the first in {result.first:.1f} s with compilation, the others in "
            f"{result.later:.3f} s each")
    if finite:
        yield Finding(topic, "ok", text)
    else:
        yield Finding(topic, "problem", f"{text}; a loss is not finite ({', '.join(f'{loss:.3g}' for loss in result.losses)})")
    for check in result.checks:
        values = f"{check.name} {check.value:.2g} (tolerance {check.tolerance:.2g})"
        if check.passed:
            yield Finding(topic, "ok", values)
        else:
            yield Finding(topic, "problem", f"{values}: {check.meaning}")


def run_ppo(mesh: Mesh) -> SelfTest:
    """Runs PPO of a model with random weights against a reward for short answers."""
    policy = _tiny_model(mesh)

    def brief(prompts, responses, **columns):
        return [-len(response) / 100 for response in responses]

    trainer = PPO(policy, reward=brief, iterations=ITERATIONS, batch=_BATCH, max_new_tokens=_NEW_TOKENS, kl_coef=0.1,
                  missing_eos="none")
    seconds, losses, began = [], [], time.perf_counter()
    # A failed check is a finding here; the trainer's warning would repeat it.
    logger = logging.getLogger("jaxalign")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        for step in trainer.fit(list(PROMPTS)):
            losses.append(float(step.metrics["policy_loss"]))
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
    finally:
        logger.setLevel(level)
    return SelfTest(trainer.checks, tuple(losses), seconds[0], statistics.median(seconds[1:]))


def _tiny_model(mesh: Mesh) -> LanguageModel:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in chatml.train_files(PROMPTS, 300).items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        tokenizer = load_tokenizer(folder)
    config = DecoderConfig(vocab=tokenizer.vocab_size, layers=2, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=128)
    model = Model(config, "lm", make_sharding(mesh))
    return LanguageModel(model, jax.jit(model.init, out_shardings=model.shardings())(jax.random.key(0)), tokenizer, "plain",
                         _MAX_LENGTH)


def _product_size() -> int:
    return _PRODUCT.get(jax.default_backend(), _PRODUCT_ELSEWHERE)


def product_rate(dtype: jax.typing.DTypeLike, runs: int = 5) -> float:
    """FLOP/s of the product of two square matrices at JAX's default precision: the best of `runs`."""
    size = _product_size()
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    product(matrix, matrix).block_until_ready()
    best = math.inf
    for _ in range(runs):
        began = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
