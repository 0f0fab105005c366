"""Loads the reward models of earlier stages, and builds the reward of `config.reward` from a run's config and folders, with the
built-in sources and their records."""

from __future__ import annotations

from pathlib import Path

from jaxalign.config import Config
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.constitution import load_constitution
from jaxalign.models.model import Model, Params
from jaxalign.registry.core import load_object
from jaxalign.registry.rewards import REWARDS, reward_records
from jaxalign.rewards.base import Reward, RewardInputs
from jaxalign.rewards.checked import as_reward
from jaxalign.rewards.functions import FunctionReward
from jaxalign.rewards.learnt import LearntReward
from jaxalign.rewards.outside import OutsideReward, load_reward_model
from jaxalign.rewards.rated import RatedReward, Rater
from jaxalign.rewards.scorer import Ensemble, Scorer, stack_members, student_model
from jaxalign.rewards.sums import fused_source, is_single, sum_of_rewards
from jaxalign.rewards.verifiers import VERIFIERS
from jaxalign.rl.ahead import Scores
from jaxalign.stages.shared import judges, reads, run_models
from jaxalign.stages.shared.base import StageContext
from jaxalign.steps.checkpoint import load_params
from jaxalign.tracking.workdir import read_object
from jaxalign.trainers.reward_model import member_directory


def load_scorer(
    context: StageContext, source: str, policy: Model, clip: float | None = None
) -> tuple[Scorer, Params]:
    """(a reward model of this run, its weights). An ensemble's weights are stacked.

    Takes the arguments of `find_scorer`.
    """
    scorer, folders = find_scorer(context, source, policy, clip)
    members = [run_models.with_base(context, scorer.model, load_params(folder / "params", scorer.model)) for folder in folders]
    return scorer, members[0] if scorer.ensemble is None else stack_members(members)


def find_scorer(
    context: StageContext, source: str, policy: Model, clip: float | None = None
) -> tuple[Scorer, list[Path]]:
    """(a reward model of this run without its weights, the folder of each member).

    Args:
      source: "preference", or "distilled" for its student.
      policy: the run's architecture.
      clip: clips normalised scores to +-clip; None for no clipping.

    The scorer has the normalisation that its stage measured.
    """
    ensemble = None
    if source == "preference":
        directory, model = context.input_directory("preference"), policy.with_head("scalar")
    else:
        directory, model = context.input_directory("reward_distill"), student_model(context.config.reward_distill, policy)
    summary = read_object(directory / "summary.json")
    folders = [directory]
    if source == "preference" and "members" in summary:
        shift, scale = (tuple(member[name] for member in summary["members"]) for name in ("shift", "scale"))
        ensemble = Ensemble(shift, scale, summary["combine"], summary["std_weight"])
        folders = [member_directory(directory, number) for number in range(len(shift))]
    return Scorer(model, summary["shift"], summary["scale"], clip, ensemble), folders


def scores_of(context: StageContext, policy: Model) -> Scores:
    """The source of the scores, as far as the config determines it before any weights are read.

    It is the scorer that is fused into the scoring program, "host" for a function on the host, or "unknown" if only the
    constructed reward can tell, as for a sum.
    """
    config = context.config
    fused = fused_source(config.reward, config.mesh.offload)
    if fused is not None:
        scorer, _ = find_scorer(context, fused, policy, config.ppo.score_clip)
        return "unknown" if scorer.ensemble else scorer
    return "host" if is_single(config.reward) and reward_records(config.reward.source)[0].host else "unknown"


def reward_stages(config: Config) -> tuple[str, ...]:
    """The stages that the reward reads."""
    records = reward_records(config.reward.source)
    stages_by_record = [reads.base_stages(config) if record.reads_base else () for record in records]
    stages_by_record += [judges.judge_stages(config, "ppo") for record in records if record.asks_judge]
    stages_by_record += [record.stages for record in records]
    return tuple(dict.fromkeys(stage for stages in stages_by_record for stage in stages))


def reward_files(config: Config) -> dict[Path, str]:
    """The user's files that the reward reads, with the config fields that name them."""
    records = reward_records(config.reward.source)
    paths = judges.feedback_files(config, "ppo") if any(record.asks_judge for record in records) else {}
    for record in records:
        files = record.load("files")
        paths = paths | (files(config) if files is not None else {})
    return paths


def make_reward(context: StageContext, policy: Model, tokenizer: Tokenizer) -> Reward:
    """The reward of `config.reward`: its only part, or a weighted sum of its parts, minus the length penalty."""
    settings, inputs = context.config.reward, RewardInputs(context.config, tokenizer, policy, context)
    parts = {
        record.name: as_reward(record.load("make")(inputs), tokenizer, settings, record.name)
        for record in reward_records(context.config.reward.source)
    }
    return sum_of_rewards(parts, settings.weights, settings)


@REWARDS.declare(
    "preference", stages=("preference",), learnt=True, is_model=True, needs=("comparisons",),
    programs="jaxalign.planner.reward_programs:preference",
)
def make_preference(inputs: RewardInputs) -> Reward:
    """The run's preference model."""
    scorer, params = load_scorer(inputs.context, "preference", inputs.policy, inputs.config.ppo.score_clip)
    return LearntReward(scorer, run_models.frozen_role(inputs.context, inputs.policy, params), "preference")


@REWARDS.declare(
    "distilled", stages=("preference", "reward_distill"), learnt=True, is_model=True, needs=("comparisons",),
    programs="jaxalign.planner.reward_programs:distilled",
)
def make_distilled(inputs: RewardInputs) -> Reward:
    """The student of the run's preference model."""
    scorer, params = load_scorer(inputs.context, "distilled", inputs.policy, inputs.config.ppo.score_clip)
    return LearntReward(scorer, run_models.frozen_role(inputs.context, inputs.policy, params), "distilled")


@REWARDS.declare(
    "model", is_model=True,
    reads=("model", "model_style", "model_max_length", "model_batch", "model_dtype", "model_shift", "model_scale",
           "max_dropped_share"),
    files="jaxalign.rewards.outside:model_files", programs="jaxalign.planner.reward_programs:outside",
)
def make_model(inputs: RewardInputs) -> Reward:
    """The reward model of `config.reward.model`."""
    config = inputs.config
    model = load_reward_model(config.reward, inputs.policy.sharding, config.ppo.score_clip)
    return OutsideReward(model, "frozen" in config.mesh.offload, config.reward.max_dropped_share)


def callable_files(config: Config) -> dict[Path, str]:
    """The file in `config.reward.callable`, if it has the form "FILE.py:name"."""
    return reads.plugin_file(config.reward.callable, "reward.callable")


@REWARDS.declare(
    "callable", host=True, reads=("callable", "retries", "timeout_s", "backoff_s", "while_sampling", "max_dropped_share"),
    files=callable_files,
)
def make_callable(inputs: RewardInputs) -> Reward:
    """The reward from the function `config.reward.callable`."""
    settings = inputs.config.reward
    fn = load_object(settings.callable, "config.reward.callable")
    if not callable(fn):
        raise UserError(f"config.reward.callable is {settings.callable!r}, of type {type(fn).__name__}; a function "
                        "(prompts, responses, **columns) -> scores is expected")
    return FunctionReward("callable", fn, settings, inputs.tokenizer, settings.callable)


@REWARDS.declare(
    "verifier", host=True, reads=("verifier", "retries", "timeout_s", "backoff_s", "while_sampling", "max_dropped_share"),
    needs=("answers",),
)
def make_verifier(inputs: RewardInputs) -> Reward:
    """The verifier of `config.reward.verifier`."""
    settings = inputs.config.reward
    return FunctionReward("verifier", VERIFIERS[settings.verifier], settings, inputs.tokenizer, settings.verifier)


@REWARDS.declare(
    "ai_feedback", reads_base=True, asks_judge=True, reads=("principles", "max_dropped_share"), needs=("feedback",),
    programs="jaxalign.planner.reward_programs:ai_feedback",
)
def make_ai_feedback(inputs: RewardInputs) -> Reward:
    """Ratings by the judge of `config.feedback`."""
    config, context = inputs.config, inputs.context
    judge = judges.make_judge(context, "ppo", inputs.policy, config.ppo.batch, trains=True)
    rater = Rater(judge, load_constitution(config.feedback.constitution), config.reward.principles, context.stream_seed)
    return RatedReward(rater, context.key("ppo", "ratings"), config.reward.max_dropped_share, config.data.style)
