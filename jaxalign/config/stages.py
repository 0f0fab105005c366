"""`config.stages`: its constraint, and the config sections of custom stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxalign.errors import UserError
from jaxalign.registry.stages import STAGES, StageRecord, stages_in_order

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


def own_sections(stages: Iterable[str], taken: Iterable[str]) -> dict[str, Any]:
    """The default sections of custom stages, by stage name: of registered stages and of those in `stages`.

    Args:
        stages: names as in `config.stages`. Unknown names are ignored here; the field's constraint rejects them.
        taken: the names of the config's built-in fields.

    Raises:
        UserError: a module cannot be imported, a section has the name of a built-in field, or a section is not a frozen
            dataclass with fields built by `jaxalign.config.field`.
    """
    taken = set(taken)
    records = [*STAGES, *(STAGES.get(name, "config.stages") for name in stages if ":" in name)]
    return {record.name: _section_of(record, taken) for record in records if record.section is not None}


def _section_of(record: StageRecord, taken: set[str]) -> Any:
    section = record.load("section")
    kind = section if isinstance(section, type) else type(section)
    said = f"the section of stage {record.name!r}"
    if record.name in taken:
        raise UserError(f"{said} has the name of an existing section of the config; give the stage another name")
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:
        raise UserError(f"{said} is of type {kind.__name__}; a frozen dataclass is expected")
    wrong = [entry.name for entry in dataclasses.fields(kind) if "doc" not in entry.metadata]
    if wrong:
        raise UserError(f"{said} has the field {wrong[0]}, which has no documentation; define it with jaxalign.config.field")
    return section() if isinstance(section, type) else section
