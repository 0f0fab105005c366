"""Shared parts of the over-optimisation study: settings, models and prompts, sampling, scoring and reward-model training."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxalign.config import Config, Optimizer, PPOConfig, check, from_config_dict
from jaxalign.data.chat import styles
from jaxalign.data.loader import EpochLoader, take
from jaxalign.data.sources.generated import world_of
from jaxalign.errors import UserError
from jaxalign.models.model import Model, Params
from jaxalign.records import PairBatch, Prompt
from jaxalign.rewards.scorer import Scorer, raw_sequence_scores
from jaxalign.rl.state import PPOSetup
from jaxalign.rollout.sampler import Engine, LocalSampler, sample_rollout
from jaxalign.rollout.sampling import Sampling
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.manifest import read_manifest
from jaxalign.steps.arguments import PreferenceArguments
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.preference_step import preference_step
from jaxalign.steps.state import init_state

CHUNK = 256  # rows of one call of the engine or of a reward model


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that determines the results besides the work directory. A folder contains the results of one `Settings`."""

    seed: int = 0
    sizes: tuple[tuple[int, int], ...] = ((1, 16), (2, 32), (2, 64))  # layers and width of the proxies
    pairs: tuple[int, ...] = (128, 512, 2048)  # numbers of training comparisons
    held_out_pairs: int = 512
    temperature: float = 1.3  # of the initial policy, and therefore of every policy
    max_new_tokens: int = 56
    gold_prompts: int = 1024
    gold_steps: int = 300
    proxy_steps: int = 200  # maximum; also limited by proxy_epochs passes over the comparisons
    proxy_epochs: int = 20
    pair_batch: int = 32
    learning_rate: float = 1e-3
    gold_learning_rate: float = 5e-4
    measured_prompts: int = 64
    best_of: int = 128
    measured_at: tuple[int, ...] = (0, 1, 2, 4, 7, 12, 19, 28, 40)  # measured iterations of RL; the last one ends it
    rl_answers: int = 4  # per held-out prompt
    rl: PPOConfig = PPOConfig(
        prompts=1024, batch=32, group_size=4, advantages="rloo", kl_coef=0.0, missing_eos="none", epochs=1, minibatches=1,
        optimizer=Optimizer(learning_rate=5e-4, schedule="constant", eps=1e-5),
    )


class Answers(NamedTuple):
    """Prompts with their answers: int32 tokens [B, T], padded on the right, and length [B]."""

    tokens: np.ndarray
    length: np.ndarray


class Study:
    """The models and prompts of the run, with sampling and scoring."""

    def __init__(self, workdir: Path, out: Path, settings: Settings):
        self.settings, self.out = settings, out
        rl = dataclasses.replace(
            settings.rl, iterations=settings.measured_at[-1], temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
        )
        config = dataclasses.replace(read_config(workdir), seed=settings.seed, ppo=rl)
        check(config)
        self.context = StageContext(config, workdir, out, False)
        self.config = config
        self.tokenizer = run_models.load_tokenizer(self.context)
        self.policy = run_models.make_model(config, self.tokenizer.vocab_size)
        self.scorer = self.policy.with_head("scalar")
        self.start = run_models.stage_params(self.context, "sft", self.policy)
        self.world = world_of(read_config(workdir))
        self.wanted_pairs = max(settings.pairs) + settings.held_out_pairs
        self.pair_prompts = -(-self.wanted_pairs * 5 // 4)  # Extra prompts, because pairs of equal answers are dropped.
        self.prompts = {
            "gold": self.world.prompts("compare", settings.gold_prompts),
            "rl": self.world.prompts("rl", rl.prompts),
            "pairs": self.world.prompts("rl", rl.prompts + self.pair_prompts)[rl.prompts :],
            "measure": self.world.prompts("evaluate", settings.measured_prompts),
        }
        self.ids = {name: [self.encode(prompt) for prompt in found] for name, found in self.prompts.items()}
        longest = max(len(row) for rows in self.ids.values() for row in rows)
        self.engine = Engine(self.policy, CHUNK, config.model.max_length, bucket=-(-longest // 8) * 8)
        self.width = self.engine.bucket + settings.max_new_tokens
        updates = rl.iterations * rl.epochs * rl.minibatches
        optimizer = make_optimizer(rl.optimizer, updates)
        # One setup for all proxies, so that RL compiles once; scores are computed outside it.
        self.setup = PPOSetup(self.policy, self.scorer, optimizer, optimizer, rl)

    def encode(self, prompt: Prompt) -> list[int]:
        return styles.encode_prompt(self.tokenizer, prompt.messages, self.config.data.style)

    def key(self, stream: int) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.settings.seed), stream)

    def rollouts(self, params: Params, ids: Sequence[list[int]], key: jax.Array, temperature: float):
        """Yield (rollout on the host, number of valid rows), chunk by chunk."""
        sampling = Sampling(self.settings.max_new_tokens, (self.tokenizer.eos_id,), temperature)
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            rows = range(start, start + len(chunk))
            sampler, padding = LocalSampler(self.engine, params), self.engine.padding
            yield sample_rollout(sampler, padding, chunk, key, rows, sampling, versions=False), len(chunk)

    def answers(self, params: Params, ids: Sequence[list[int]], key: jax.Array, temperature: float) -> Answers:
        """Sample one answer per prompt."""
        parts = [(r.tokens[:n], (r.prompt_length + r.response_length)[:n])
                 for r, n in self.rollouts(params, ids, key, temperature)]
        return Answers(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def scores(self, model: Model, params: Params, answers: Answers) -> np.ndarray:
        """Return raw scores, float32 [B]."""
        out = []
        for start in range(0, len(answers.length), CHUNK):
            index = np.minimum(np.arange(start, start + CHUNK), len(answers.length) - 1)
            out.append(np.asarray(raw_sequence_scores(Scorer(model), params, answers.tokens[index], answers.length[index])))
        return np.concatenate(out)[: len(answers.length)]

    def learn(self, model: Model, params: Params, pairs: PairBatch, steps: int, rate: float, stream: int):
        """Train a reward model on the pairs. Returns its parameters and the metrics averaged over its last 10 steps."""
        optimizer = preference_optimizer(rate, steps)
        loader = EpochLoader(len(pairs.label), self.settings.pair_batch, self.settings.seed, stream)
        state, last = init_state(model, optimizer, params, self.key(stream)), []
        for step in range(steps):
            given = PreferenceArguments(
                model=model, optimizer=optimizer, centering_coef=0.01, batch=take(pairs, loader.indices(step))
            )
            state, metrics = preference_step(state, given)
            last = [*last[-9:], metrics]
        means = {name: float(np.mean([float(getattr(row, name)) for row in last])) for name in ("loss", "accuracy")}
        return state.params, means


@functools.cache
def preference_optimizer(rate: float, steps: int):
    """Return the same object for equal settings, so that training compiles once per size."""
    return make_optimizer(Optimizer(learning_rate=rate, schedule="linear", warmup_steps=10), steps)


def read_config(workdir: Path) -> Config:
    """Read the config of a finished run on the embedded world. Raises UserError if it is not one."""
    path = workdir / "config.json"
    if not path.exists() or read_manifest(workdir / "sft") is None or not (workdir / "sft" / "params").exists():
        raise UserError(f"{workdir} has no finished supervised policy; run python -m jaxalign.train --workdir={workdir}")
    config = from_config_dict(json.loads(path.read_text(encoding="utf-8")))
    if config.data.source != "world" or config.model.source != "scratch":
        raise UserError(f"{workdir} is not a run on the embedded world (data.source=world, model.source=scratch), whose "
                        "truth trains the gold reward model; pass the folder of a default run")
    return config


def agreement(study: Study, model: Model, params: Params, pairs: PairBatch) -> dict:
    """Return the share of decided pairs whose preferred answer a reward model also prefers.

    Raises UserError if no pair is decided.
    """
    decided = np.abs(pairs.label - 0.5) > 0.1
    if not decided.any():
        raise UserError(f"none of {len(pairs.label)} held-out pairs has a better answer: the supervised policy writes no "
                        "answers that differ in truth; train it longer, or hold out more prompts")
    tokens, length = pairs.tokens[decided], pairs.length[decided]
    flat = Answers(tokens.reshape(-1, tokens.shape[-1]), length.reshape(-1))
    scores = study.scores(model, params, flat).reshape(-1, 2)
    right = (scores[:, 0] > scores[:, 1]) == (pairs.label[decided] > 0.5)
    return {"held_out_pairs": int(decided.sum()), "held_out_accuracy": float(right.mean())}


def count(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
