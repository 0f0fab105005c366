"""The whole config: its fields and sections, also those of custom stages; reading it; and checks across sections."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from ml_collections import config_dict

from jaxalign.config import rounds, schema
from jaxalign.config.base import check_multiple, check_response_length
from jaxalign.config.constraints import at_least, between, registered
from jaxalign.config.reading import refuse_unread, unmet
from jaxalign.config.schema import field, section
from jaxalign.config.sections.arithmetic import ArithmeticConfig
from jaxalign.config.sections.best_of_n import BestOfNConfig
from jaxalign.config.sections.compare import CompareConfig
from jaxalign.config.sections.data import DataConfig
from jaxalign.config.sections.dpo import DPOConfig
from jaxalign.config.sections.endpoint import EndpointConfig
from jaxalign.config.sections.evaluate import EvaluateConfig
from jaxalign.config.sections.feedback import FeedbackConfig
from jaxalign.config.sections.judge import JudgeConfig
from jaxalign.config.sections.lora import Lora
from jaxalign.config.sections.mesh import Mesh
from jaxalign.config.sections.model import ModelConfig
from jaxalign.config.sections.online_dpo import OnlineDPOConfig
from jaxalign.config.sections.placement import PlacementConfig
from jaxalign.config.sections.ppo import PPOConfig
from jaxalign.config.sections.preference import PreferenceConfig
from jaxalign.config.sections.pretrain import PretrainConfig
from jaxalign.config.sections.revise import ReviseConfig
from jaxalign.config.sections.reward import RewardConfig
from jaxalign.config.sections.reward_distill import RewardDistillConfig
from jaxalign.config.sections.sft import SFTConfig
from jaxalign.config.sections.tracking import TrackingConfig
from jaxalign.config.sections.world import WorldConfig
from jaxalign.errors import UserError
from jaxalign.registry.samplers import SAMPLERS, sampler_record
from jaxalign.registry.stages import STAGES, Batch, StageRecord, stages_in_order

DEFAULT_STAGES = ("pretrain", "revise", "sft", "compare", "preference", "ppo", "evaluate", "report")


class InGraphOrder:
    """The constraint that there is at least one stage, without repetition, each after the stages that it must follow."""

    @property
    def text(self) -> str:
        """See `jaxalign.config.constraints.Constraint`."""
        return f"some of {', '.join(STAGES.names())}, or 'package.module:name' for your own, in this order"

    def require(self, value: tuple[str, ...], path: str) -> None:
        """See `jaxalign.config.constraints.Constraint`."""
        given = tuple(STAGES.get(name, path).name for name in value)
        ordered = tuple(record.name for record in stages_in_order(value, path))
        if not given or given != ordered:
            raise UserError(f"{path} is {value!r}; it must be {self.text}")


def stage_names(values: Any) -> tuple[str, ...]:
    """The stages of an unchecked config; entries that are not strings are left out."""
    stages = values.get("stages", DEFAULT_STAGES)
    return tuple(name for name in stages if isinstance(name, str)) if isinstance(stages, (tuple, list)) else ()


_TRACED = re.compile(r"(?P<stage>\w+):(?P<first>\d+)(:(?P<count>[1-9]\d*))?")


def traced_steps(spec: str) -> tuple[str, int, int]:
    """Parses STAGE:STEP or STAGE:STEP:COUNT into (stage, first step, number of steps, by default 1).

    Raises:
        UserError: `spec` has neither form.
    """
    match = _TRACED.fullmatch(spec)
    if match is None:
        raise UserError(f"config.profile is {spec!r}; STAGE:STEP or STAGE:STEP:COUNT is expected, such as ppo:10:3")
    return match["stage"], int(match["first"]), int(match["count"] or 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run."""

    seed: int = field(0, "Seed of all random numbers in the run.", between(0, 2**31 - 1))
    stages: tuple[str, ...] = field(DEFAULT_STAGES, "The stages to run, in order.", InGraphOrder())
    rounds: int = field(1, "The number of rounds of answers, labels, reward model and training of the policy (the stages from "
                        "compare to the last one that trains a policy). Each later round starts from the last policy; "
                        "see docs/cai.md.", at_least(1))
    compile_cache: str | None = field("", "Folder for cached compiled programs; empty: ~/.cache/jaxalign, None: no cache. "
                                       "A folder keeps at most 4 GiB, or JAX_COMPILATION_CACHE_MAX_SIZE bytes.")
    profile: str = field("", "Steps to profile, as STAGE:STEP:COUNT (ppo:10:3); empty: none. Traces go to the stage's folder "
                         "`profile`.")
    sampler: str = field("local", "The sampler of the policy's responses in ppo, online_dpo, best_of_n, reward_distill and "
                         "evaluate: local (this process), or 'package.module:name' or 'FILE.py:name' of your own; "
                         "see docs/extending.md.", registered(SAMPLERS, sampler_record))
    mesh: Mesh = section(Mesh(), "")
    placement: PlacementConfig = section(PlacementConfig(), "")
    model: ModelConfig = section(ModelConfig(), "")
    lora: Lora = section(Lora(), "")
    data: DataConfig = section(DataConfig(), "")
    world: WorldConfig = section(WorldConfig(), "")
    arithmetic: ArithmeticConfig = section(ArithmeticConfig(), "")
    pretrain: PretrainConfig = section(PretrainConfig(), "")
    revise: ReviseConfig = section(ReviseConfig(), "")
    sft: SFTConfig = section(SFTConfig(), "")
    feedback: FeedbackConfig = section(FeedbackConfig(), "")
    judge: JudgeConfig = section(JudgeConfig(), "")
    endpoint: EndpointConfig = section(EndpointConfig(), "")
    compare: CompareConfig = section(CompareConfig(), "")
    preference: PreferenceConfig = section(PreferenceConfig(), "")
    reward_distill: RewardDistillConfig = section(RewardDistillConfig(), "")
    best_of_n: BestOfNConfig = section(BestOfNConfig(), "")
    dpo: DPOConfig = section(DPOConfig(), "")
    online_dpo: OnlineDPOConfig = section(OnlineDPOConfig(), "")
    reward: RewardConfig = section(RewardConfig(), "")
    ppo: PPOConfig = section(PPOConfig(), "")
    evaluate: EvaluateConfig = section(EvaluateConfig(), "")
    tracking: TrackingConfig = section(TrackingConfig(), "")


def _section_of(record: StageRecord) -> Any:
    """The default section of a custom stage. Raises UserError if it has the name of a built-in field, or is not a frozen
    dataclass with fields built by `jaxalign.config.field`."""
    default = record.load("section")
    kind = default if isinstance(default, type) else type(default)
    said = f"the section of stage {record.name!r}"
    if record.name in schema.field_types(Config):
        raise UserError(f"{said} has the name of an existing section of the config; give the stage another name")
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:
        raise UserError(f"{said} is of type {kind.__name__}; a frozen dataclass is expected")
    wrong = [entry.name for entry in dataclasses.fields(kind) if "doc" not in entry.metadata]
    if wrong:
        raise UserError(f"{said} has the field {wrong[0]}, which has no documentation; define it with jaxalign.config.field")
    return default() if isinstance(default, type) else default


@functools.cache
def _with_sections(sections: tuple[tuple[str, Any], ...]) -> Config:
    """The default config with additional fields for the sections of custom stages, given as (name, default)."""
    fields = [(name, type(default), section(default)) for name, default in sections]
    return dataclasses.make_dataclass("Config", fields, bases=(Config,), frozen=True)()


def default_for(stages: Iterable[str]) -> Config:
    """The default config, including the sections of custom stages: the registered ones and those that `stages` names.

    Unknown names are ignored here; the constraint of the field `stages` rejects them.

    Raises:
        UserError: `stages` is not a list of names, a module cannot be imported, or the section of a custom stage is not valid.
    """
    names = None if isinstance(stages, (str, bytes)) or not isinstance(stages, Iterable) else list(stages)
    if names is None or not all(isinstance(name, str) for name in names):
        raise UserError(f"stages is {str(stages)[:60]!r}; a list of names of stages is expected")
    records = [*STAGES, *(STAGES.get(name, "config.stages") for name in names if ":" in name)]
    own = {record.name: _section_of(record) for record in records if record.section is not None}
    return _with_sections(tuple(own.items())) if own else Config()


def default_config() -> config_dict.ConfigDict:
    """The defaults, for a config file to modify. The dictionary accepts any key and type; `from_config_dict` checks them."""
    return schema.to_config_dict(default_for(()))


def from_config_dict(values: config_dict.ConfigDict | dict[str, Any]) -> Config:
    """The frozen, typed config. Fields missing from `values` keep their defaults.

    Raises:
        UserError: an unknown key, a wrong type, a value out of range, or values that conflict.
    """
    if not isinstance(values, (Mapping, config_dict.ConfigDict)):
        raise UserError(f"the config is of type {type(values).__name__}; a ConfigDict, as default_config returns it, or a "
                        "mapping is expected")
    config = schema.from_mapping(default_for(stage_names(values)), values)
    check(config)
    return config


def reset_unread(values: config_dict.ConfigDict, selector: str) -> None:
    """Resets to their defaults the options that have no effect with the value of `selector`, for example "model.source"."""
    for path, conditions in _unmet(lambda dotted: operator.attrgetter(dotted)(values)):
        if any(selector in alternatives for alternatives in conditions):
            section, _, name = path.rpartition(".")
            operator.attrgetter(section)(values)[name] = schema.get(Config(), path)


def unread_fields(values: Mapping[str, Any]) -> set[str]:
    """The dotted names of the options of the sections that have no effect with the values of the others.

    Args:
        values: a config as nested dictionaries. Missing fields count as their defaults.
    """

    def value_of(dotted: str) -> Any:
        value: Any = values
        for name in dotted.split("."):
            if not isinstance(value, Mapping) or name not in value:
                return schema.get(Config(), dotted)
            value = value[name]
        return value

    return {path for path, conditions in _unmet(value_of) if conditions}


def _unmet(
    value_of: Callable[[str], Any], kind: type = Config, prefix: str = ""
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The dotted name of each option of a section with its unmet conditions (`jaxalign.config.reading.unmet`)."""
    for name, inner in schema.field_types(kind).items():
        for entry in dataclasses.fields(inner) if dataclasses.is_dataclass(inner) else ():
            yield f"{prefix}{name}.{entry.name}", list(unmet(entry, f"{prefix}{name}", value_of))
        if dataclasses.is_dataclass(inner):
            yield from _unmet(value_of, inner, f"{prefix}{name}.")


def to_dict(config: Config) -> dict[str, Any]:
    """The config as nested dictionaries of JSON values; `from_config_dict` reads it back."""
    return schema.to_plain(require_config(config, "to_dict(config)"))


def require_config(config: Any, name: str) -> Config:
    """`config` itself. Raises UserError, which names the argument, unless it is a `Config`."""
    if not isinstance(config, Config):
        raise UserError(f"{name} is of type {type(config).__name__}; a Config, as from_config_dict returns it, is expected")
    return config


def check(config: Config) -> None:
    """Raises UserError for the first conflict between fields, but for all response lengths and batches that do not fit.

    Sections of stages that are not in `config.stages` are not checked: the mesh need not divide a batch that never runs.
    """
    require_config(config, "check(config)")
    records = {record.name: record for record in stages_in_order(config.stages)}
    trained = [name for name, record in records.items() if record.trains]
    if config.profile and traced_steps(config.profile)[0] not in trained:
        raise UserError(f"config.profile is {config.profile!r}, but only stages that train can be profiled; in this run: "
                        f"{', '.join(trained) or 'none'}")
    if config.sampler != Config.sampler and not any(record.uses_sampler for record in records.values()):
        readers = ", ".join(record.name for record in STAGES if record.uses_sampler)
        raise UserError(f"config.sampler is {config.sampler!r}, but no stage of this run uses it: leave it at "
                        f"{Config.sampler!r}, or run one of {readers}")
    usual = default_for(config.stages)
    for name, kind in schema.field_types(type(config)).items():
        is_stage = name in STAGES or name not in schema.field_types(Config)
        if dataclasses.is_dataclass(kind) and (name in records or not is_stage):
            _check_section(getattr(config, name), getattr(usual, name), config, name)
    _check_sizes(config, records.values())
    rounds.check(config)


def _check_sizes(config: Config, records: Collection[StageRecord]) -> None:
    """Raises one UserError, with a line for each response length and batch of the stages that does not fit."""
    mistakes: dict[str, None] = {}
    for record in records:
        checks = [functools.partial(check_batch, config, record, batch) for batch in record.batches]
        if record.samples and hasattr(getattr(config, record.name), "max_new_tokens"):
            checks.insert(0, functools.partial(check_response_length, getattr(config, record.name), config, record.name))
        for one in checks:
            try:
                one()
            except UserError as error:
                mistakes[str(error)] = None
    if mistakes:
        raise UserError("\n".join(mistakes))


def _check_section(part: Any, usual: Any, config: Config, name: str) -> None:
    """Checks a section and its nested sections. usual: the section's defaults."""
    refuse_unread(part, usual, name, lambda dotted: schema.get(config, dotted))
    if hasattr(part, "check"):
        part.check(config, name)
    for inner, kind in schema.field_types(type(part)).items():
        if dataclasses.is_dataclass(kind):
            _check_section(getattr(part, inner), getattr(usual, inner), config, f"{name}.{inner}")


def check_batch(config: Config, record: StageRecord, batch: Batch) -> None:
    """Checks that a batch divides evenly into its parts, over the mesh, and over the devices that sample."""
    mesh, rows, field_name = config.mesh, schema.get(config, batch.rows), f"config.{batch.rows}"
    split = {f"config.mesh.{axis}": getattr(mesh, axis) for axis in ("data", "fsdp")}
    factors = {f"config.{factor}": schema.get(config, factor) or 1 for factor in batch.factors} | split
    factors["config.mesh.pipeline_micro_batches"] = mesh.pipeline_micro_batches or mesh.pipeline
    check_multiple(field_name, rows, factors)
    if record.samples:  # During sampling, the batch is also split over these axes.
        axes = ("pipeline", "context", "tensor") if mesh.generation == "whole" else ("pipeline", "context")
        check_multiple(field_name, rows, split | {f"config.mesh.{axis}": getattr(mesh, axis) for axis in axes})
