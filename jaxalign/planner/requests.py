"""The requests of a run to the server of `config.endpoint`: their number, tokens and price, as upper bounds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from jaxalign.config import Config, rounds
from jaxalign.config.sections.feedback import ppo_methods
from jaxalign.data.chat.requests import load_set
from jaxalign.endpoint.records import Usage
from jaxalign.endpoint.spending import TokenPrices
from jaxalign.feedback.constitution import load_constitution
from jaxalign.feedback.endpoint_judge import verdict_tokens
from jaxalign.planner.stage_programs import evaluated_models, rated_answers
from jaxalign.records import Message
from jaxalign.registry.advantages import ADVANTAGES
from jaxalign.registry.judges import judge_name
from jaxalign.registry.stages import stages_in_order

_CHARACTERS_PER_TOKEN = 3  # English text has about 4 with the tokenizers of current models.


class RequestCount(NamedTuple):
    """Requests of one kind. texts: the variables of the template that contain a text of the policy or the judge."""

    kind: str
    number: int
    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PlannedRequests:
    """The requests of one stage, at most.

    Attributes:
      stage: the name of the stage.
      requests: their number.
      verdicts: the number of those that ask for a verdict or a rating.
      prompt_tokens: tokens of the requests; None if the length of the prompts is unknown.
      completion_tokens: the maximum number of tokens that the server generates.
      price: in the currency of the prices; None if it is unknown.
    """

    stage: str
    requests: int
    verdicts: int
    prompt_tokens: int | None
    completion_tokens: int
    price: float | None


def planned_requests(config: Config, prompt: int | None) -> list[PlannedRequests]:
    """The requests of each stage whose judge is the endpoint, over all rounds, if the server shows log-probabilities.

    Args:
      config: the config.
      prompt: tokens of the longest prompt; None: unknown.

    Raises:
      UserError: the template set, the constitution or the prices cannot be read.
    """
    names = [record.name for record in stages_in_order(config.stages)]
    repeated = rounds.repeated_stages(config) if config.rounds > 1 else ()
    planned = []
    for name in names:
        if judge_name(config, name) == "endpoint":
            times = config.rounds if name in repeated else 1
            asked = [each._replace(number=each.number * times) for each in _asked(config, name)]
            planned += [_planned(config, name, asked, prompt)] if sum(each.number for each in asked) else []
    return planned


def _planned(config: Config, stage: str, asked: list[RequestCount], prompt: int | None) -> PlannedRequests:
    new, tokens, generated = getattr(config, stage).max_new_tokens, 0, 0
    for each in asked:
        tokens += each.number * ((prompt or 0) + new * len(each.texts) + _template_tokens(config, each))
        generated += each.number * (new if each.kind in ("critique", "revision") else verdict_tokens(config.feedback))
    verdicts = sum(each.number for each in asked if each.kind in ("comparison", "rating"))
    prices, price = TokenPrices(config.endpoint), None
    if prompt and prices.are_set and (config.endpoint.model or not config.endpoint.prices):
        price = prices.of(config.endpoint.model).of(Usage(tokens, generated))
    return PlannedRequests(stage, sum(each.number for each in asked), verdicts, tokens if prompt else None, generated, price)


def _template_tokens(config: Config, asked: RequestCount) -> int:
    """An estimate for the text of the template with the longest principle of the constitution."""
    templates = load_set(config.feedback.templates or "chat")
    values: dict[str, Any] = dict.fromkeys(asked.texts, "")
    if asked.kind in ("comparison", "rating"):
        values["reasoning"] = bool(config.feedback.reasoning)
    sizes = []
    for principle in load_constitution(config.feedback.constitution):
        messages = templates.render(asked.kind, [Message("user", "")], principle, **values).messages
        sizes.append(sum(len(message.content) for message in messages))
    return math.ceil(max(sizes) / _CHARACTERS_PER_TOKEN)


def _comparisons(config: Config, pairs: int) -> RequestCount:
    """Each pair in both orders, under each principle, with each sample of the reasoning."""
    principles = min(config.feedback.principles_per_comparison, len(load_constitution(config.feedback.constitution)))
    return RequestCount("comparison", 2 * pairs * principles * config.feedback.reasonings, ("first", "second"))


def _asked(config: Config, stage: str) -> list[RequestCount]:
    """The requests of a built-in stage to its judge; empty for other stages."""
    if stage == "revise":
        number = config.revise.red_team_prompts * config.revise.rounds
        return [RequestCount("critique", number, ("response",)), RequestCount("revision", number, ("response", "critique"))]
    if stage == "compare":
        return [_comparisons(config, config.compare.prompts)]
    if stage == "online_dpo":
        return [_comparisons(config, config.online_dpo.iterations * config.online_dpo.batch)]
    if stage == "evaluate":
        pairs = math.comb(evaluated_models(config), 2)
        compared = _comparisons(config, pairs * min(config.evaluate.win_rate_prompts, config.evaluate.prompts))
        return [compared, RequestCount("rating", rated_answers(config), ("response",))]
    if stage != "ppo":
        return []
    section, methods, asked = config.ppo, ppo_methods(config), []
    if "rate" in methods:
        answers = 2 if ADVANTAGES.get(section.advantages, "config.ppo.advantages").needs_greedy else 1
        number = section.iterations * section.batch * answers * config.reward.principles
        asked.append(RequestCount("rating", number, ("response",)))
    if "compare" in methods:
        measured = math.ceil(section.iterations / section.alarms.every)
        asked.append(_comparisons(config, measured * section.alarms.prompts))
    return asked
