"""The feedback model and its labels."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import at_least, between, one_of
from jaxalign.config.reading import unless, when
from jaxalign.config.schema import field
from jaxalign.errors import UserError
from jaxalign.registry.core import names_in
from jaxalign.registry.data_sources import data_source
from jaxalign.registry.judges import judge_field, judge_name, judge_record, stage_judge
from jaxalign.registry.stages import policies_before, stages_in_order

_REASONING = unless("reasoning", False, "to True")


@dataclasses.dataclass(frozen=True)
class FeedbackConfig(Section):
    """The feedback model: its principles and its labels."""

    constitution: str = field("default", "Name of a built-in constitution, or path of a JSON file, or of a .txt file with one "
                                         "principle on each line.")
    judge: str = field("local", "Source of critiques, revisions, comparisons and ratings: local (the run's base model, or "
                       "that of judge_stage), model (the language model in judge.path), endpoint (a model behind "
                       "an OpenAI-compatible server, endpoint.url), or "
                       "'package.module:name' or 'FILE.py:name' of your own class, object or JudgeRecord; see "
                       "docs/cai.md.")
    judge_stage: str = field("", "With judge=local: the stage of the run whose policy judges in later stages; empty: the base.")
    templates: str = field("", "Templates of the requests to a judge that is a language model: chat (for instruction-tuned "
                           "models, and for judge=endpoint), transcript (for base models), world (for models that pretrain "
                           "trains), or a folder of your own; empty: world if the tokenizer has jaxalign's markers, else chat. "
                           "See docs/cai.md.")
    thinking: str = field("auto", "Whether a judge that is a reasoning model, such as Qwen3, thinks before its critiques, its "
                          "revisions and its reasoning (on, off); auto: the default of its chat template. A verdict without "
                          "reasoning is read without thoughts; with judge=endpoint and auto, the server decides.",
                          one_of("auto", "on", "off"))
    share_prefix: bool = field(True, "Let a local judge compute the common beginning of several requests once, for example the "
                               "dialogue and the answers of a pair that is asked under several principles. Changes "
                               "probabilities only by rounding. No effect on a mesh with context or pipeline.")
    max_outside_mass: float = field(0.5, "If a judge that is a language model gives more than this probability to text other "
                                    "than the options, its verdict or rating does not count.", between(0.0, 1.0))
    ties: bool | None = field(None, "Whether a judge that is a language model may answer that neither of two answers is "
                              "better. A label counts this answer one half for each. None: if the templates have such an "
                              "answer.")
    invert: bool = field(False, "Invert every label. This is a control experiment: it should make the policy worse.")
    reasoning: bool | None = field(None, "Let the feedback model reason before its verdict (chain of thought). None: only "
                                   "with templates=world, if the run's base model judges and has jaxalign's markers, and "
                                   "for a judge of your own, whose labels are then clamped.")
    clamp_low: float = field(0.1, "Lower bound of labels after reasoning.", between(0.0, 0.5), _REASONING)
    clamp_high: float = field(0.9, "Upper bound of labels after reasoning.", between(0.5, 1.0), _REASONING)
    principles_per_comparison: int = field(4, "Principles drawn per comparison, at most all of the constitution.", at_least(1))
    aggregate: str = field("decided", "A pair's label: the mean over the principles that decide it (decided), the mean over "
                           "all (mean), or the label of the strongest (strongest).", one_of("decided", "mean", "strongest"))
    second_order: str = field("unless_tie", "Whether to ask again with the answers in the other order: always, or unless_tie, "
                              "if the first answer is not a tie.", one_of("always", "unless_tie"))
    consistent: bool = field(True, "A label is decided only if the judge prefers the same answer in both orders.")
    correct_position: bool = field(True, "In stage compare, estimate the judge's preference for the answer shown first, and "
                                   "remove it before labels are decided.")
    undecided_margin: float | None = field(None, "A label closer to 0.5 than this is undecided. None: in stage compare, the "
                                           "smallest margin at which max_chance_share holds; 0.1 in other stages.",
                                           between(0.0, 0.5))
    max_chance_share: float = field(0.05, "With undecided_margin=None: the largest share of decided labels that may be due to "
                                    "chance, estimated from the contradictions between the two orders.", between(0.0, 1.0),
                                    when("undecided_margin", None))
    reasonings: int = field(1, "Number of sampled chains of thought per verdict, whose probabilities are averaged; above 1, "
                            "reasoning_temperature must be above 0.", at_least(1), _REASONING)
    undecided: str = field("drop", "Keep undecided comparisons with label 0.5 (half), or drop them.", one_of("half", "drop"))
    required_share: float = field(0.05, "Stop before preference or dpo if a smaller share of the pairs of stage compare can be "
                                  "trained on.", between(0.0, 1.0))
    undecided_weight: float = field(1.0, "With undecided=half: the weight of an undecided pair's loss.", between(0.0, 1.0),
                                    when("undecided", "half"))
    reasoning_temperature: float = field(0.0, "Sampling temperature of the reasoning; 0 is greedy.", at_least(0), _REASONING)
    max_reasoning_tokens: int = field(160, "Maximum length of the reasoning, in tokens.", at_least(1), _REASONING)

    def reasons(self, config: WholeConfig) -> bool:
        """Whether the judge reasons before its verdict: `reasoning`, or the choice that None stands for."""
        if self.reasoning is not None:
            return self.reasoning
        if self.templates == "world" or self.judge not in ("local", "model", "endpoint"):
            return True
        compact = config.data.style == "compact" or (config.data.style == "auto" and config.model.source == "scratch")
        return self.templates == "" and self.judge == "local" and compact

    def check(self, config: WholeConfig, name: str) -> None:
        """Checks that the judges exist and have the methods that the stages call, and that the local judge can be used."""
        judge_record(self.judge, "config.feedback.judge")
        if self.reasonings > 1 and not self.reasoning_temperature:
            raise UserError(f"config.feedback.reasonings is {self.reasonings}, but config.feedback.reasoning_temperature is 0, "
                            "so all samples would be equal; set the temperature above 0, or reasonings to 1")
        asked = {stage.name: stage.asks_judge for stage in stages_in_order(config.stages) if stage.asks_judge}
        methods_of_ppo = ppo_methods(config)
        if "ppo" in config.stages and methods_of_ppo:
            asked["ppo"] = methods_of_ppo
        if "evaluate" in config.stages:
            rates = ("rate",) if config.evaluate.rubrics else ()
            named = bool(config.judge.evaluate) or self.judge in ("model", "endpoint")
            compares = named and (config.evaluate.win_rate_prompts > 0 or not rates)
            if methods := (("compare",) if compares else ()) + rates:
                asked["evaluate"] = methods
        local: dict[str, list[str]] = {}  # The stages that ask the local judge, by the field that selects it.
        for stage, methods in asked.items():
            record, field_name = stage_judge(config, stage), judge_field(config, stage)
            missing = [method for method in methods if record.methods is not None and method not in record.methods]
            if missing:
                raise UserError(f"config.{field_name} is {judge_name(config, stage)!r}, which has no method {missing[0]!r}; "
                                f"stage {stage} needs it: add it, or choose another judge")
            if record.runs_base:
                local.setdefault(field_name, []).append(stage)
        for field_name, stages in local.items():
            self._check_local(config, field_name, ", ".join(stages))
        asking = [stage for stages in local.values() for stage in stages]
        if "evaluate" in config.stages and stage_judge(config, "evaluate").runs_base:
            asking.append("evaluate")
        if self.judge_stage and not any(self.judging_stage(config, stage) for stage in asking):
            raise UserError(f"config.feedback.judge_stage is {self.judge_stage!r}, but no stage after it asks the local judge; "
                            "leave it empty, or name a stage that trains a policy before compare, online_dpo or evaluate")
        for judge, place, given, needed in (
            ("model", "judge.path", config.judge.path, "the folder of a language model"),
            ("endpoint", "endpoint.url", config.endpoint.url, "the server's base URL, such as http://localhost:8000/v1"),
        ):
            outside = [stage for stage in (*asked, "evaluate") if judge_name(config, stage) == judge]
            if outside and not given:
                raise UserError(f"config.{judge_field(config, outside[0])} is {judge!r}, but config.{place} is empty; set it "
                                f"to {needed}")
            if given and not outside:
                raise UserError(f"config.{place} is {', '.join(given)}, but no stage asks this judge; set feedback.judge to "
                                f"{judge!r}, or leave {place} empty")
        models = ("local", "model", "endpoint")
        local_methods = {method for stage, methods in asked.items() if judge_name(config, stage) in models
                         for method in methods}
        thinks = bool(local_methods & {"critique", "revise"}) or bool(local_methods and self.reasons(config))
        # The server of an endpoint lets a reasoning model think before every reply unless a request forbids it.
        forbids = self.thinking == "off" and any(judge_name(config, stage) == "endpoint" for stage in asked)
        # The Python API has no stages: its caller asks for what it needs.
        if config.stages and self.thinking != "auto" and not (thinks or forbids):
            raise UserError(f"config.feedback.thinking is {self.thinking!r}, but no stage asks a local judge for a critique or "
                            "for reasoning; leave it at 'auto', or set feedback.reasoning to True")

    def judging_stage(self, config: WholeConfig, stage: str) -> str:
        """The stage whose policy is the local judge of `stage`: judge_stage if it is trained before; "" for the base."""
        return self.judge_stage if self.judge_stage in policies_before(config.stages, stage) else ""

    def _check_local(self, config: WholeConfig, field_name: str, stages: str) -> None:
        """Checks that the base model can judge, and that it has space for its reasoning."""
        source = data_source(config)
        if source.alphabet and config.model.source == "scratch":
            raise UserError(f"config.{field_name} is 'local', but config.data.source {source.name!r} trains a base model "
                            f"that cannot judge: set {field_name} to a judge of your own for {stages}")
        length, limit = config.judge.max_length, "config.judge.max_length"
        if not length:
            length, limit = config.model.max_length, "config.model.max_length"
        if self.reasons(config) and self.max_reasoning_tokens >= length:
            raise UserError(f"config.feedback.max_reasoning_tokens is {self.max_reasoning_tokens}; it must be below "
                            f"{limit} ({length}), which includes the dialogue")


def ppo_methods(config: WholeConfig) -> tuple[str, ...]:
    """The methods of the judge that stage ppo calls, for its reward and for its alarms."""
    rates = ("rate",) if "ai_feedback" in names_in(config.reward.source) else ()
    return rates + (("compare",) if config.ppo.asks_to_compare else ())
