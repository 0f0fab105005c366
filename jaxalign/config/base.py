"""The base class of config sections, and checks that several sections share."""

from __future__ import annotations

from typing import Any, Protocol

from jaxalign.errors import UserError


class WholeConfig(Protocol):
    """The type of the whole config in a section's check. `jaxalign.config.root.Config` itself imports the sections."""

    stages: tuple[str, ...]

    def __getattr__(self, section: str) -> Any: ...


class Section:
    """A section of the config. A subclass is a frozen dataclass with fields built by `field` and `section`."""

    def check(self, config: WholeConfig, name: str) -> None:
        """Raises UserError if fields of this section conflict with each other or with the rest of `config`.

        Args:
            config: the whole config.
            name: this section's dotted name, such as "ppo" or "ppo.optimizer".
        """


def check_response_length(section: Any, config: WholeConfig, name: str) -> None:
    """Checks that `max_new_tokens` leaves space for a prompt."""
    if section.max_new_tokens >= config.model.max_length:
        raise UserError(f"config.{name}.max_new_tokens is {section.max_new_tokens}; it must be below config.model.max_length "
                        f"({config.model.max_length}), which includes the prompt")


def check_dialogue_length(section: Any, config: WholeConfig, name: str) -> None:
    """Checks that the model can read the section's longest dialogue."""
    if section.max_length > config.model.max_length:
        raise UserError(f"config.{name}.max_length is {section.max_length}; it must be at most config.model.max_length "
                        f"({config.model.max_length})")
