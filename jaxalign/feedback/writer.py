"""Writes requests as the token ids that a judge reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxalign.data.chat import encoding as chat
from jaxalign.data.chat.dialogues import cut_front
from jaxalign.data.chat.formats import ASSISTANT, render_request
from jaxalign.data.chat.requests import KINDS, TemplateSet, load_set
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.tokenizers.files import THINKING
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.contract import Contract, read_contract
from jaxalign.feedback.options import Options, make_options
from jaxalign.records import Exemplar, Message, Principle


class Written(NamedTuple):
    """A request as token ids.

    notes: names in `reasons.NOTES`, if something had to be left out. exemplars: the number of examples in the request.
    lost_turns: the number of turns of the dialogue that are missing.
    """

    ids: list[int]
    notes: tuple[str, ...] = ()
    exemplars: int = 0
    lost_turns: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class RequestWriter:
    """Writes requests with a template set for a judge.

    Attributes:
      templates: the template set.
      tokenizer: the judge's tokenizer.
      max_length: the maximum length of a request with the judge's text, in tokens.
      exemplars: the examples that precede a request, at most.
      ties: whether the judge may answer that neither of two answers is better; requires a tie in form.json.
    """

    templates: TemplateSet
    tokenizer: Tokenizer
    max_length: int
    exemplars: tuple[Exemplar, ...] = ()
    ties: bool = False

    @functools.cached_property
    def contract(self) -> Contract:
        """The form of the judge's answers."""
        return read_contract(self.templates.form, f"the template set {self.templates.name}")

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end the judge's text."""
        if self.templates.layout == "chat":
            return chat.stop_ids(self.tokenizer)
        return (self.tokenizer.eos_id,) if self.templates.layout == "markers" else self.tokenizer.stop_ids

    def write(
        self, kind: str, dialogue: Sequence[Message], principle: Principle, new_tokens: int, **values: Any
    ) -> Written | None:
        """A request with space for `new_tokens` after it; None if it does not fit.

        If it is too long, it loses examples, the last ones first, and then the oldest turns of the dialogue. It never loses a
        part of the last question, of an answer or of a principle.

        Args:
          kind: "critique", "revision", "comparison" or "rating".
          dialogue: the turns up to the assessed answer.
          principle: the principle.
          new_tokens: the maximum length of the judge's text.
          values: the other variables of the template.

        Raises:
          DialogueRefused: the template set or the chat template refuses the dialogue.
        """
        room = self.max_length - new_tokens
        exemplars = self.exemplars_of(kind)
        for count in range(len(exemplars), -1, -1):
            ids = self._ids(kind, dialogue, principle, exemplars[:count], values)
            if len(ids) <= room:
                return Written(ids, ("fewer_exemplars",) if count < len(exemplars) else (), count)
        shorter = cut_front(tuple(dialogue), lambda part: len(self._ids(kind, part, principle, (), values)) <= room)
        if shorter is None:
            return None
        notes = ("fewer_exemplars", "shortened") if exemplars else ("shortened",)
        return Written(self._ids(kind, shorter, principle, (), values), notes, 0, len(dialogue) - len(shorter))

    def exemplars_of(self, kind: str) -> tuple[Exemplar, ...]:
        """The examples that a request of this kind shows if there is space for them."""
        return self.exemplars if "exemplars" in self.templates.variables(kind) else ()

    def options(self, kind: str) -> Options:
        """The options of a comparison or a rating, as the judge would write them; with `ties`, the third one is the tie.

        Raises:
          UserError: the tokenizer cannot tell two options apart, or has no tokens for one.
        """
        contract = self.contract
        names = (*contract.options, *([contract.tie] if self.ties else [])) if kind == "comparison" else contract.ratings
        where = f"the template set {self.templates.name} with the tokenizer of {self.tokenizer.files.folder}"
        end = self.tokenizer.eos_id if contract.ended else None
        if self.templates.layout == "markers":
            return make_options(names, contract.spellings, lambda text: self.tokenizer.encode_segments([text]), where, end)
        encode = functools.partial(self.tokenizer.encode, continues=True)
        return make_options(names, contract.spellings, encode, where, end)

    def check(self, kinds: Sequence[str], reasoning: bool, new_tokens: int = 0) -> None:
        """Checks, before anything is computed, that the judge can be asked requests of these kinds.

        Args:
          kinds: "critique", "revision", "comparison" and "rating", or some of them.
          reasoning: whether the judge reasons before a verdict.
          new_tokens: the maximum length of the judge's text, in tokens.

        Raises:
          UserError: the set lacks a template, the tokenizer does not suit its layout, the chat template cannot write a request
            or the beginning of an answer, the judge's context is too short for any request, or the options cannot be told
            apart.
        """
        name, folder = self.templates.name, self.tokenizer.files.folder
        if self.templates.layout == "chat":
            if self.tokenizer.files.chat_template is None:
                raise UserError(f"the judge in {folder} has no chat template, which the template set {name!r} needs; set "
                                "feedback.templates to 'transcript' if it is a base model, or put chat_template.jinja there")
            chat.encode_answer(self.tokenizer, "A")
        if self.templates.layout == "markers":
            try:
                self.tokenizer.marker_id(ASSISTANT)
            except UserError:
                raise UserError(f"the tokenizer of the judge in {folder} lacks jaxalign's markers, which the template set "
                                f"{name!r} needs; set feedback.templates to 'chat' or 'transcript'") from None
        principle = Principle("probe", *(["Probe?"] * 3))
        for kind in kinds:
            values = {part: "Probe." for part in ("response", "critique", "first", "second") if part in KINDS[kind]}
            judged = kind in ("comparison", "rating")
            if judged and reasoning:
                if "thoughts" not in self.templates.variables(kind):
                    raise UserError(f"{kind}.jinja of the template set {name} does not contain {{{{ thoughts }}}}, which "
                                    "feedback.reasoning needs; add it, or set feedback.reasoning to False")
                values |= {"reasoning": True, "thoughts": "Probe."}
            try:
                length = len(self._ids(kind, (Message("user", "Probe?"),), principle, (), values))
            except DialogueRefused as error:
                raise UserError(f"the template set {name!r} cannot ask the judge in {folder}: {error}") from None
            if length + new_tokens > self.max_length:
                raise UserError(f"the judge in {folder} reads at most {self.max_length} tokens, but a {kind} of the template "
                                f"set {name!r} takes {length} without any text, and {new_tokens} are for the judge's text; "
                                "raise judge.max_length, or model.max_length if the run's own model judges")
            if judged:
                self.options(kind)

    def _ids(
        self, kind: str, dialogue: Sequence[Message], principle: Principle, exemplars: Sequence[Exemplar],
        values: Mapping[str, Any],
    ) -> list[int]:
        values = {**values, "ties": self.ties} if kind == "comparison" else values
        messages, role, begin = self.templates.render(kind, dialogue, principle, exemplars, **values)
        if self.templates.layout == "chat":
            if role != "assistant":
                raise UserError(f"the answer of {kind}.jinja in the template set {self.templates.name} has the role {role!r}; "
                                "in the layout chat it must be 'assistant'")
            # A verdict without reasoning is read right after the request, so a reasoning model must not think before it.
            at_once = kind in ("comparison", "rating") and not values.get("reasoning")
            ids = chat.encode_prompt(self.tokenizer, messages, {THINKING: False} if at_once else {})
            return ids + self.tokenizer.encode(begin, continues=True)
        style = "hh" if self.templates.layout == "transcript" else "compact"
        return list(self.tokenizer.begin_ids) + self.tokenizer.encode_segments(render_request(messages, role, begin, style))


def choose_set(name: str, tokenizer: Tokenizer) -> TemplateSet:
    """The template set `name`; if it is empty, "world" for a tokenizer with jaxalign's markers, else "chat"."""
    if name:
        return load_set(name)
    try:
        tokenizer.marker_id(ASSISTANT)
    except UserError:
        return load_set("chat")
    return load_set("world")
