"""jaxalign: alignment of language models in JAX.

    import jaxalign as ja

    policy = ja.load_model("FOLDER")
    print(ja.Sampler(policy).generate(["Once upon a time"], max_new_tokens=40).texts)

The names in `__all__` are the public API (docs/python.md). Each is imported on first use, so that `import jaxalign` loads
neither JAX nor NumPy.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Constitution": "jaxalign.feedback.constitution",
    "DPO": "jaxalign.trainers.direct",
    "Judge": "jaxalign.trainers.judging",
    "LanguageModel": "jaxalign.models.language_model",
    "Lora": "jaxalign.config",
    "Mesh": "jaxalign.config",
    "PPO": "jaxalign.trainers.ppo",
    "RewardModel": "jaxalign.trainers.reward_model",
    "SFT": "jaxalign.trainers.sft",
    "Sampler": "jaxalign.rollout.generation:Sampler",
    "UserError": "jaxalign.errors",
    "advantages": "jaxalign.advantages:",
    "config": "jaxalign.config:",
    "evaluate": "jaxalign.trainers.evaluation",
    "lm_eval": "jaxalign.trainers.harness",
    "lm_eval_model": "jaxalign.trainers.harness",
    "load_model": "jaxalign.models.language_model",
    "losses": "jaxalign.losses:",
    "pipeline": "jaxalign.pipeline:",
    "read_rows": "jaxalign.data.sources.sequence",
    "registries": "jaxalign.registries:",
    "responses": "jaxalign.rl.responses:",
    "revise": "jaxalign.trainers.judging",
    "tracker": "jaxalign.tracking.sinks.make",
}
"""Where each public name is defined: "module" (an attribute of that name), "module:attribute", or "module:" (the module)."""

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jaxalign' has no attribute {name!r}")
    place, colon, attribute = _PUBLIC[name].partition(":")
    module = importlib.import_module(place)
    value = module if colon and not attribute else getattr(module, attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
