"""A short run of PPO with a custom part."""

from __future__ import annotations

import itertools

from jaxalign.config import Checks
from jaxalign.trainers.ppo import PPO
from tests.trainers.small import PAIRS, language_model

FIELDS = {"iterations": 2, "batch": 8, "max_new_tokens": 8, "epochs": 1, "minibatches": 1, "missing_eos": "none",
          "checks": Checks(step_zero=False)}


def steps(count: int = 2, **fields) -> list[dict[str, float]]:
    def brief(prompts, responses, **columns):
        return [-len(response) / 10 for response in responses]

    trainer = PPO(language_model(), reward=brief, **FIELDS | fields)
    return [step.metrics for step in itertools.islice(trainer.fit([row["prompt"] for row in PAIRS]), count)]
