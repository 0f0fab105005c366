"""The requests that the judge of a stage will read, for `jaxalign.preview`, without any model's weights.

Answers, critiques and thoughts are not known before the stage runs, so requests show placeholders in brackets.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxalign import streams
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.feedback.constitution import load_constitution, load_exemplars
from jaxalign.feedback.critique import draw_principles
from jaxalign.feedback.endpoint_judge import ChatMessages, verdict_tokens
from jaxalign.feedback.judge import ComparisonRequest, CritiqueRequest, RatingRequest, RevisionRequest
from jaxalign.feedback.local import make_writer
from jaxalign.feedback.writer import RequestWriter, Written
from jaxalign.records import Principle, Prompt
from jaxalign.registry.judges import judge_name
from jaxalign.stages.shared import endpoints, judges, run_models
from jaxalign.stages.shared.base import StageContext
from jaxalign.tracking.tokens import GIVEN, TokenRow, printable, visible

ANSWER, ANSWER_A, ANSWER_B = "[the answer]", "[answer A]", "[answer B]"
CRITIQUE, THOUGHTS = "[the critique]", "[the reasoning]"

JudgeCall = tuple[str, NamedTuple]
"""The name of a judge's method, and its request."""


class _Pass(NamedTuple):
    """One reading of a request. name: for the heading. values: the variables of the template. new_tokens: the maximum length
    of the judge's text. options: whether the judge's text is one of the options."""

    name: str
    values: Mapping[str, Any]
    new_tokens: int
    options: bool = False


def revise_requests(context: StageContext, prompts: Sequence[Prompt]) -> list[list[TokenRow]]:
    """For each of the first prompts of stage revise, the requests of the first round."""
    config, stream = context.config, streams.PRINCIPLES["revise"]
    judge, rows = _Judge(context, "revise"), []
    for number, prompt, rules in _drawn(context, prompts, range(len(prompts)), config.revise.rounds, stream):
        asked = [("critique", CritiqueRequest(prompt.messages, ANSWER, rules[0])),
                 ("revise", RevisionRequest(prompt.messages, ANSWER, rules[0], CRITIQUE))]
        later = ", ".join(rule.name for rule in rules[1:])
        rows.append(judge.rows(f"revise {number}", asked, (f"principles of the next rounds: {later}",) if later else ()))
    return rows


def compare_requests(context: StageContext, prompts: Sequence[Prompt]) -> list[list[TokenRow]]:
    """For each of the first prompts of stage compare, the request with the answers in the first order."""
    config, stream = context.config, streams.PRINCIPLES["labels"]
    judge, rows = _Judge(context, "compare"), []
    count = config.feedback.principles_per_comparison
    for number, prompt, rules in _drawn(context, prompts, range(len(prompts)), count, stream):
        asked = [("compare", ComparisonRequest(prompt.messages, ANSWER_A, ANSWER_B, rules[0]))]
        lines = ("asked again with the answers in the other order", *_averaged("label", rules))
        rows.append(judge.rows(f"compare {number}", asked, lines))
    return rows


def rate_requests(context: StageContext, prompts: Sequence[Prompt], rows: Sequence[int]) -> list[list[TokenRow]]:
    """For each prompt of stage ppo, the rating request. rows: the global row of each prompt's first answer."""
    config, stream = context.config, streams.PRINCIPLES["ratings"]
    judge = _Judge(context, "ppo")
    return [
        judge.rows(f"rate {number}", [("rate", RatingRequest(prompt.messages, ANSWER, rules[0]))], _averaged("reward", rules))
        for number, prompt, rules in _drawn(context, prompts, rows, config.reward.principles, stream)
    ]


def local_writers(context: StageContext, stage: str) -> list[RequestWriter]:
    """The writer of the requests to each model that judges in a stage; empty for a server and for a judge of the user's own."""
    config, name = context.config, judge_name(context.config, stage)
    exemplars = load_exemplars(config.feedback.constitution)
    if name == "local":
        length = config.judge.local_length(config)
        return [make_writer(run_models.load_tokenizer(context), config.feedback, length, exemplars)]
    if name != "model":
        return []
    writers = []
    for folder in config.judge.path:
        tokenizer, length = judges.folder_requests(config, folder)
        writers.append(make_writer(tokenizer, config.feedback, length, exemplars))
    return writers


def _drawn(context: StageContext, prompts: Sequence[Prompt], rows: Sequence[int], count: int, stream: int):
    """(number from 1, prompt, the principles that its row draws) for each prompt."""
    drawn = draw_principles(load_constitution(context.config.feedback.constitution), rows, count, context.config.seed, stream)
    return [(number, *pair) for number, pair in enumerate(zip(prompts, drawn, strict=True), start=1)]


def _averaged(result: str, rules: Sequence[Principle]) -> tuple[str, ...]:
    """A line about the other principles of a request, if there are any."""
    names = ", ".join(rule.name for rule in rules)
    if len(rules) < 2:
        return ()
    how = "follows from the verdicts" if result == "label" else "is the average"
    return (f"the {result} {how} under the principles {names}",)


class _Judge:
    """Shows requests to the judge of a stage.

    Args:
      context: the context.
      stage: the stage that asks the judge. Its config section has max_new_tokens, the maximum length of the policy's answer
        and of the judge's texts.
    """

    def __init__(self, context: StageContext, stage: str):
        judges.feedback_files(context.config, stage)  # Checks the templates, as the run does before its first stage.
        self.name, self.settings = judge_name(context.config, stage), context.config.feedback
        self.length = getattr(context.config, stage).max_new_tokens
        self.writers = local_writers(context, stage)
        self.chat = ChatMessages(endpoints.templates(context.config), self.settings) if self.name == "endpoint" else None

    def rows(self, title: str, asked: Sequence[JudgeCall], lines: tuple[str, ...] = ()) -> list[TokenRow]:
        """The rows of one prompt's requests; `lines` follow the last one."""
        if self.chat is not None:
            rows = [self._chat(self.chat, title, method, request) for method, request in asked]
        elif not self.writers:
            rows = [_fields(f"{title}, {method} by {self.name}", request) for method, request in asked]
        else:
            several = len(self.writers) > 1
            rows = [
                self._row(writer, f"{title}, {part.name}" + f" by member {member}" * several, method, request, part)
                for member, writer in enumerate(self.writers, start=1)
                for method, request in asked
                for part in self._passes(writer, method, request)
            ]
        return [*rows[:-1], dataclasses.replace(rows[-1], lines=rows[-1].lines + lines)]

    def _chat(self, chat: ChatMessages, title: str, method: str, request: Any) -> TokenRow:
        """One request as the messages that the server gets."""
        kind = judges.REQUEST_KINDS[method]
        title = f"{title}, {kind}"
        try:
            messages = chat.write(kind, request)
        except DialogueRefused as error:
            return TokenRow(title, (), "", ("not asked",), (str(error),))
        reads = kind in ("comparison", "rating")
        length = verdict_tokens(self.settings) if reads else self.length
        notes = (f"principle {request.principle.name}", f"the judge writes up to {length} tokens")
        lines = []
        for message in messages:
            lines.append(f"  {message['role']}:")
            lines += [f"    {printable(line)}".rstrip() for line in message["content"].split("\n")]
        lines += [f"options: {', '.join(chat.options(kind))}"] if reads else []
        return TokenRow(title, (), "", notes, tuple(lines))

    def _passes(self, writer: RequestWriter, method: str, request: NamedTuple) -> list[_Pass]:
        kind = judges.REQUEST_KINDS[method]
        values = {name: value for name, value in request._asdict().items() if name not in ("messages", "principle")}
        if method in ("critique", "revise"):
            return [_Pass(kind, values, self.length)]
        longest = writer.options(kind).longest
        if not self.settings.reasoning:
            return [_Pass("verdict", values, longest, True)]
        values["reasoning"] = True
        return [_Pass("reasoning", values, self.settings.max_reasoning_tokens),
                _Pass("verdict after the reasoning", values | {"thoughts": THOUGHTS}, longest, True)]

    def _row(self, writer: RequestWriter, title: str, method: str, request: Any, part: _Pass) -> TokenRow:
        """One request as the tokens that the judge reads."""
        kind = judges.REQUEST_KINDS[method]
        ask = (kind, request.messages, request.principle, part.new_tokens)
        try:
            written = writer.write(*ask, **part.values)
        except DialogueRefused as error:
            return TokenRow(title, (), "", ("not asked",), (str(error),))
        notes = (f"principle {request.principle.name}",)
        if written is None:
            notes += (f"not asked: even without examples and earlier turns it leaves no space for {part.new_tokens} tokens of "
                      f"the judge's text in {writer.max_length}",)
            unlimited = dataclasses.replace(writer, max_length=sys.maxsize, exemplars=())
            ids = unlimited.write(kind, request.messages[-1:], *ask[2:], **part.values).ids
            return TokenRow(title, ids, GIVEN * len(ids), notes, (), writer.tokenizer)
        # The number of tokens by which texts of the maximum length exceed their placeholders.
        limits = {THOUGHTS: self.settings.max_reasoning_tokens}
        texts = [text for text in part.values.values() if isinstance(text, str)]
        growth = sum(max(0, limits.get(text, self.length) - len(writer.tokenizer.encode(text))) for text in texts)
        longest = dataclasses.replace(writer, max_length=writer.max_length - growth)
        cut, at_most = _cut(writer, kind, written), _cut(writer, kind, longest.write(*ask, **part.values))
        notes += (f"leaves {writer.max_length - len(written.ids)} of {writer.max_length} tokens, the judge writes up to "
                  f"{part.new_tokens}", *([cut] if cut else []))
        if at_most != cut:
            notes += (f"if the texts in brackets have their maximum length: {at_most}",)
        lines = (_options(writer, kind),) if part.options else ()
        return TokenRow(title, written.ids, GIVEN * len(written.ids), notes, lines, writer.tokenizer)


def _cut(writer: RequestWriter, kind: str, written: Written | None) -> str:
    """The parts that a request lost; empty if it lost none."""
    if written is None:
        return "does not fit, so it is not asked"
    total = len(writer.exemplars_of(kind))
    parts = [f"{written.exemplars} of {total} examples shown"] if written.exemplars < total else []
    if written.lost_turns:
        parts.append("loses its oldest turn" if written.lost_turns == 1 else f"loses {written.lost_turns} oldest turns")
    return ", ".join(parts)


def _options(writer: RequestWriter, kind: str) -> str:
    """The options of a verdict, with the tokens and ids of each spelling."""
    options, tokenizer = writer.options(kind), writer.tokenizer

    def shown(ids: Sequence[int]) -> str:
        return f"{chr(0x2502).join(visible(tokenizer.piece(token)) for token in ids)} ({' '.join(map(str, ids))})"

    named = zip(options.names, options.ids, strict=True)
    listed = "; ".join(f"{name}: {' or '.join(map(shown, spellings))}" for name, spellings in named)
    every = [spelling for spellings in options.ids for spelling in spellings]
    nested = any(a != b and b[: len(a)] == a for a in every for b in every)
    ended = options.end is not None and nested
    return f"options: {listed}" + (f"; if one begins another, the end {shown([options.end])} must follow" if ended else "")


def _fields(title: str, request: Any) -> TokenRow:
    """A request to a judge of the user's own: its fields."""
    lines = [f"  messages: {message.role}: {printable(message.content)}" for message in request.messages]
    for name, value in request._asdict().items():
        if name == "principle":
            lines += [f"  principle.{field}: {printable(text)}" for field, text in dataclasses.asdict(value).items()]
        elif name != "messages":
            lines.append(f"  {name}: {value}")
    return TokenRow(title, (), "", (type(request).__name__,), tuple(lines))
