"""The models of `config.judge.path` that judge in a run. Only config.json is read.

A published shape may stand for a folder, as in --config.judge.path=Llama-3.1-70B.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path

import jax

from jaxalign.config import Config
from jaxalign.config.finished import with_model_folder
from jaxalign.errors import UserError
from jaxalign.models.adapters.quantised import quantise_abstract
from jaxalign.models.checkpoints.huggingface import parse_config
from jaxalign.models.configured import base_config
from jaxalign.models.model import Model, Params
from jaxalign.parallel.sharding import Sharding
from jaxalign.planner.shapes import published_shapes
from jaxalign.registry.judges import judge_name

ROLE = "judge"
"""The role of the model of `config.judge.path`; the members of a jury are "judge 1", "judge 2" and so on."""


LABELLER = "labeller"
"""The role of the run's base as a judge."""


@dataclasses.dataclass(frozen=True)
class PlannedJudge:
    """A judge on the run's devices. length: tokens of its longest request with its text. read: returns its weights as stored,
    as ShapeDtypeStructs."""

    role: str
    model: Model
    length: int
    read: Callable[[], Params]

    @functools.cached_property
    def params(self) -> Params:
        return self.read()

    @property
    def title(self) -> str:
        """The role's name in compiled programs."""
        return "feedback model" if self.role == LABELLER else self.role


def roles(config: Config, stage: str) -> tuple[str, ...]:
    """The roles of the models in `config.judge.path` that judge in a stage; empty if another judge does."""
    if judge_name(config, stage) != "model":
        return ()
    count = len(config.judge.path)
    return (ROLE,) if count == 1 else tuple(f"{ROLE} {number}" for number in range(1, count + 1))


def judge_model(config: Config, role: str, sharding: Sharding) -> tuple[Model, int]:
    """(the model of a role of `roles`, the length of its longest request).

    Raises:
      UserError: its folder has no config.json and is not a published shape.
    """
    number = 0 if role == ROLE else int(role.removeprefix(f"{ROLE} ")) - 1
    folder = config.judge.path[number]
    if os.path.isdir(Path(folder).expanduser()):
        checkpoint = base_config(with_model_folder(config, folder), Path(folder))
    elif folder in published_shapes():
        checkpoint = parse_config(Path(folder), published_shapes()[folder], config.judge.compute_dtype)
    else:
        raise UserError(f"config.judge.path is {folder}, which is neither a folder nor one of the published shapes "
                        f"{', '.join(published_shapes())}; give the folder of a model with its config.json")
    tensor = sharding.mesh.shape["tensor"]
    decoder = dataclasses.replace(checkpoint.decoder, compute_dtype=config.judge.compute_dtype, vocab_multiple=tensor)
    return Model(decoder, "lm", sharding), config.judge.request_length(checkpoint.max_positions)


def outside_judges(config: Config, stage: str, sharding: Sharding) -> list[PlannedJudge]:
    """The models of `config.judge.path` that judge in a stage."""
    planned = []
    for role in roles(config, stage):
        model, length = judge_model(config, role, sharding)
        planned.append(PlannedJudge(role, model, length, functools.partial(stored_params, model, config.judge.weights)))
    return planned


def stored_params(model: Model, kind: str) -> Params:
    """The weights of a judge as ShapeDtypeStructs: read in float32 or bfloat16, then converted to `config.judge.weights`."""
    dtype = "float32" if kind == "float32" else "bfloat16"
    read = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), model.abstract())
    return quantise_abstract(read, kind)
