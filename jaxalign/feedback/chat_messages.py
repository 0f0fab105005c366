"""Renders requests to the messages of a chat, for a judge behind a server."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jaxalign.config import FeedbackConfig
from jaxalign.data.chat.requests import TemplateSet
from jaxalign.errors import UserError
from jaxalign.feedback.contract import Contract, read_contract
from jaxalign.feedback.judge import template_values


@dataclasses.dataclass(frozen=True)
class ChatMessages:
    """Writes the messages of requests.

    Attributes:
      templates: a template set with the layout "chat".
      settings: whether the judge reasons before a verdict, and whether it may answer with a tie.
    """

    templates: TemplateSet
    settings: FeedbackConfig

    @functools.cached_property
    def contract(self) -> Contract:
        """The form of the judge's answers."""
        return read_contract(self.templates.form, f"the template set {self.templates.name}")

    @property
    def ties(self) -> bool:
        """Whether the judge may say that neither of two answers is better."""
        return bool(self.contract.tie) if self.settings.ties is None else self.settings.ties

    def options(self, kind: str) -> tuple[str, ...]:
        """The answers to a request of the kind "comparison" or "rating"."""
        if kind == "rating":
            return self.contract.ratings
        return (*self.contract.options, *([self.contract.tie] if self.ties else []))

    def write(self, kind: str, request: Any) -> list[dict[str, str]]:
        """The messages of a request, each with "role" and "content".

        Args:
          kind: "critique", "revision", "comparison" or "rating".
          request: the request of the judge's method of this kind (`jaxalign.feedback.judge`).

        Raises:
          DialogueRefused: the template refuses the request.
          UserError: the template begins the judge's answer, which a server cannot continue.
        """
        values: dict[str, Any] = template_values(request)
        values |= {"reasoning": bool(self.settings.reasoning)} if kind in ("comparison", "rating") else {}
        values |= {"ties": self.ties} if kind == "comparison" else {}
        messages, _, begin = self.templates.render(kind, request.messages, request.principle, **values)
        if begin.strip():
            raise UserError(f"{kind}.jinja of the template set {self.templates.name} begins the judge's answer with "
                            f"{begin.strip()[:40]!r}, which an endpoint cannot continue; leave the answer block empty")
        return [{"role": message.role, "content": message.content} for message in messages]
