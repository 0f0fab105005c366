"""The inputs of trainers: a model, its weights, its seeds and the loop, from a language model in memory or from a stage; and
checks of the names of arguments, several of which are often given to the wrong call."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import optax
from ml_collections import ConfigDict

from jaxalign.config import Optimizer
from jaxalign.config.arguments import SEED, as_path, instance_of, section_from
from jaxalign.config.schema import checked, field_types
from jaxalign.config.sections.shared import AUTO
from jaxalign.errors import UserError
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Model, Params
from jaxalign.parallel.sharding import Sharding
from jaxalign.planner.hardware import chip_of
from jaxalign.registry.advantages import ADVANTAGES
from jaxalign.registry.objectives import OBJECTIVES
from jaxalign.registry.policy_losses import POLICY_LOSSES
from jaxalign.steps.checkpoint import copy_params
from jaxalign.steps.loop import Loop
from jaxalign.steps.optimizer import check_optimizer
from jaxalign.tracking.sinks.make import make_tracker
from jaxalign.tracking.tracker import Tracker

Frozen = Params | None
F = TypeVar("F", bound=Callable)

REGISTRIES = {"advantages": ADVANTAGES, "policy_loss": POLICY_LOSSES, "objective": OBJECTIVES}
"""The registry of each argument of a trainer that takes a name or a record."""

FIT_ARGUMENTS = ("held_out", "eval_every", "patience")
"""Arguments of `fit` that are often given to the trainer."""


@dataclasses.dataclass(frozen=True)
class TrainerInputs:
    """A model, functions that read its weights while programs compile, and the seeds and the loop of its training.

    `model_inputs` makes them from a language model in memory, `stages/shared/training.py` from a work directory.

    Attributes:
      model: the architecture to train.
      weights: reads the weights that training starts from; with adapters, joined with the base. A reference may also use them.
      trained: takes those weights and returns the part to train, in buffers that training may donate.
      frozen: reads the base under the adapters; returns None without adapters.
      seed: seeds the order of the rows.
      key: the PRNG key of the training state.
      root_key: the PRNG key from which the keys of other uses are folded.
      loop: the settings of the loop; the trainer sets its steps and the metrics that it shows.
      abstract_frozen: the base under the adapters as ShapeDtypeStructs.
      language_model: the language model that a trainer of the public API starts from; None in a stage.
    """

    model: Model
    weights: Callable[[], Params]
    trained: Callable[[Params], Params]
    frozen: Callable[[], Frozen]
    seed: int
    key: jax.Array
    root_key: jax.Array
    loop: Loop
    abstract_frozen: Frozen = None
    language_model: LanguageModel | None = None


def model_inputs(
    model: LanguageModel,
    section: Any,
    name: str,
    *,
    directory: str | Path | None = None,
    seed: int = 0,
    trackers: Mapping[str, Tracker] | Sequence[Tracker] = (),
    progress: bool = False,
    argument: str = "model",
) -> TrainerInputs:
    """The inputs of a trainer that starts from a language model, whose own weights are not changed.

    Args:
      model: the language model.
      section: the trainer's settings, a config section.
      name: the trainer's name in error messages and on the progress bar.
      directory: for metrics and checkpoints; None keeps everything in memory.
      seed: the seed of all randomness.
      trackers: receive the metrics of every step; trackers, or names of trackers as in `config.tracking.trackers`.
      progress: show progress on stderr.
      argument: the name of the argument with the language model.

    Raises:
      UserError: an argument has the wrong type or value.
    """
    instance_of(model, LanguageModel, f"{name}({argument})", "a LanguageModel, as load_model returns it,")
    seed = checked(seed, int, f"{name}(seed)", SEED)
    loop = Loop(
        stage=name, directory=None if directory is None else as_path(directory, f"{name}(directory)", written=True),
        trackers=_as_trackers(trackers, f"{name}(trackers)"), progress=checked(progress, bool, f"{name}(progress)"),
        peak=peak_flops(model.model), settings={"seed": seed} | _plain(section, model),
    )
    return TrainerInputs(
        model.model,
        weights=lambda: model.weights,
        trained=lambda _: copy_params(model.params),
        frozen=lambda: model.frozen,
        seed=seed,
        key=jax.random.key(seed),
        root_key=jax.random.key(seed),
        loop=loop,
        abstract_frozen=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model.frozen),
        language_model=model,
    )


def settings_from(default: Any, fields: Mapping[str, Any], trainer: str, model: Any) -> Any:
    """The settings of a trainer of the public API, from its keyword arguments.

    Args:
      default: the section that provides the fields not given.
      fields: values by field name, as `section_from` takes them. An optimizer may also be an optax optimizer, which takes the
        place of the nested section; an estimator, a policy loss or an objective may be a record of its registry.
      trainer: the trainer's name in error messages.
      model: the language model to train.

    Raises:
      UserError: a field does not exist, or its value is not valid.
    """
    kinds = field_types(type(default))
    for name in FIT_ARGUMENTS:
        if name in fields and name not in kinds:
            raise UserError(f"{name} is an argument of {trainer}.fit, not of {trainer}: call fit(rows, held_out, ...) with it")
    named = dict(fields)
    for name in REGISTRIES.keys() & fields.keys():
        kind = REGISTRIES[name].record.__name__
        named[name] = REGISTRIES[name].name_of(fields[name])
        instance_of(named[name], str, f"{trainer}.{name}", f"a jaxalign.registries.{kind}, or the name or location of one,")
    optimizers = {
        name: value for name, value in named.items()
        if kinds.get(name) is Optimizer and not isinstance(value, (Optimizer, Mapping, ConfigDict))
    }
    for name, value in optimizers.items():
        where = f"{trainer}({name})"
        instance_of(value, optax.GradientTransformation, where, "an optax optimizer, a jaxalign.config.Optimizer, or a "
                    "dictionary of its fields")
        if isinstance(model, LanguageModel):
            check_optimizer(value, model.model.abstract(), where)
    if named.get("micro_batch_tokens") == AUTO:
        raise UserError(f"{trainer}(micro_batch_tokens) is {AUTO!r}, which only a run of stages chooses; give a number, such "
                        "as the one that jaxalign plan prints")
    rest = {name: value for name, value in named.items() if name not in optimizers}
    return section_from(default, rest, trainer, optimizers)


def _plain(section: Any, model: LanguageModel) -> dict[str, Any]:
    """The values of a section. Of an optax optimizer only the state is known."""
    own = {
        name: f"optax, with a state of hash {check_optimizer(value, model.model.abstract(), name)}"
        for name, value in vars(section).items() if isinstance(value, optax.GradientTransformation)
    }
    return dataclasses.asdict(section) | own


def _as_trackers(trackers: Any, name: str) -> Mapping[str, Tracker] | Sequence[Tracker]:
    """The trackers, with an object in place of each name. Raises UserError unless they are a sequence of trackers and names of
    trackers, or a mapping from names to trackers."""
    trackers, one = () if trackers is None else trackers, "an object with the methods start, log and finish"
    if isinstance(trackers, str | bytes):
        raise UserError(f"{name} is the text {trackers!r:.80}; a list of trackers or names is expected, such as "
                        "['tensorboard']")
    instance_of(trackers, Mapping | Sequence, name, "a list of trackers, or a mapping from names to trackers,")
    if isinstance(trackers, Sequence):
        trackers = [make_tracker(item, f"{name}[{i}]") if isinstance(item, str) else item for i, item in enumerate(trackers)]
    named = trackers if isinstance(trackers, Mapping) else {str(i): tracker for i, tracker in enumerate(trackers)}
    for key, tracker in named.items():
        instance_of(key, str, f"a key of {name}", "a string")
        if isinstance(tracker, type):
            raise UserError(f"{name}[{key}] is the class {tracker.__name__}; {one} is expected: give an instance")
        instance_of(tracker, Tracker, f"{name}[{key}]", one)
    return trackers


def peak_flops(model: Model, shardings: Mapping[str, Sharding] | None = None) -> float:
    """The peak FLOP/s of all devices of a run together; 0 if the kind of one is unknown.

    model: the model, of which the devices count. shardings: the mesh of each role with a mesh of its own, whose devices count
    too, each once.
    """
    meshes = [model.sharding.mesh, *(sharding.mesh for sharding in (shardings or {}).values())]
    kinds = [chip_of(device.device_kind) for device in {device for mesh in meshes for device in mesh.devices.flat}]
    return 0.0 if None in kinds else sum(chip.flops(model.config.compute_dtype) for chip in kinds)


def named_arguments(fit: F) -> F:
    """Decorates a trainer's method `fit`: an argument that it does not have raises UserError instead of TypeError."""
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def checked_fit(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            signature.bind(self, *arguments, **named)
        except TypeError as error:
            raise UserError(_refusal(self, list(signature.parameters)[1:], named, error)) from None
        return fit(self, *arguments, **named)

    return checked_fit


def _refusal(trainer: Any, known: list[str], named: dict[str, Any], error: TypeError) -> str:
    call, owner = f"{trainer.name}.fit", type(trainer).__name__
    unknown = next((name for name in named if name not in known), None)
    if unknown is None:
        return f"{call} was called with wrong arguments ({error}); {', '.join(known)} are expected"
    if unknown in inspect.signature(type(trainer).__init__).parameters or unknown in field_types(type(trainer.section)):
        return f"{unknown} is an argument of {owner}, not of {call}: create the trainer with {owner}(..., {unknown}=...)"
    near = difflib.get_close_matches(unknown, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{unknown} is not an argument of {call}; {', '.join(known)} are expected{hint}"
