"""What must hold between fields of the config, beyond each field's own check.

Only the sections of stages that are to run are judged: a mesh need not divide a batch that is never made.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from jaxalign import config_mesh
from jaxalign.errors import UserError
from jaxalign.registry.trackers import tracker_record

if TYPE_CHECKING:
    from jaxalign.config import Config, Model, RewardDistill

STEPPING = ("pretrain", "sft", "preference", "reward_distill", "best_of_n", "dpo", "online_dpo", "ppo")
"""The stages that train in steps."""
_TRACED = re.compile(r"(?P<stage>\w+):(?P<first>\d+)(:(?P<count>[1-9]\d*))?")


def check(config: Config) -> None:
    """Raises UserError at the first pair of fields that do not fit together."""
    _check_profile(config)
    _check_model(config)
    _check_lora(config)
    _check_preference(config)
    _check_distill(config)
    _check_data(config)
    _check_optimizers(config)
    config_mesh.check(config)
    _check_lengths(config)
    _check_controller(config)
    _check_dpo(config)
    _check_ppo(config)
    _check_tracking(config)


def traced_steps(spec: str) -> tuple[str, int, int]:
    """(stage, first step, how many) of STAGE:STEP or STAGE:STEP:COUNT; one step where no count is given.

    Raises:
        UserError: it is neither.
    """
    match = _TRACED.fullmatch(spec)
    if match is None:
        raise UserError(f"config.profile is {spec!r}; STAGE:STEP or STAGE:STEP:COUNT is expected, such as ppo:10:3")
    return match["stage"], int(match["first"]), int(match["count"] or 1)


def _check_profile(config: Config) -> None:
    if not config.profile:
        return
    stage = traced_steps(config.profile)[0]
    able = [name for name in config.stages if name in STEPPING]
    if stage not in able:
        raise UserError(f"config.profile is {config.profile!r}, but of the stages of this run {', '.join(able) or 'none'} "
                        "can be traced: those that train in steps")


def _check_tracking(config: Config) -> None:
    trackers = config.tracking.trackers
    for name in trackers:
        tracker_record(name, "config.tracking.trackers")
        if trackers.count(name) > 1:
            raise UserError(f"config.tracking.trackers names {name!r} twice; name each tracker once")


def _check_model(config: Config) -> None:
    model = config.model
    if model.remat_saves != "nothing" and not model.remat:
        raise UserError(f"config.model.remat_saves is {model.remat_saves!r} but config.model.remat is False, so all is kept: "
                        "set remat to True, or remat_saves to 'nothing'")
    if model.source == "huggingface":
        if not model.path:
            raise UserError("config.model.source is 'huggingface' but config.model.path is empty; set it to the folder "
                            "with config.json, the safetensors weights and the tokenizer")
        return
    _check_heads("model", model)


def _check_lora(config: Config) -> None:
    lora = config.lora
    if lora.base != "float32" and not lora.rank and not lora.path:
        raise UserError(f"config.lora.base is {lora.base!r} but config.lora.rank is 0, which trains the base itself; set rank "
                        "above 0, or base to 'float32'")
    if not lora.path:
        return
    if config.model.source != "huggingface":
        raise UserError(f"config.lora.path is {lora.path!r} but config.model.source is {config.model.source!r}; adapters of "
                        "PEFT stand on a Hugging Face model: set model.source to 'huggingface', or leave lora.path empty")
    for entry in dataclasses.fields(lora):
        value, usual = getattr(lora, entry.name), entry.default
        if entry.name not in ("path", "base") and value != usual:
            raise UserError(f"config.lora.{entry.name} is {value!r} but config.lora.path is set, whose adapter_config.json "
                            f"says it; leave {entry.name} at {usual!r}")


def _check_heads(name: str, sizes: Model | RewardDistill) -> None:
    """A decoder's attention heads, in the section of that name."""
    if sizes.heads % sizes.kv_heads:
        raise UserError(f"config.{name}.heads is {sizes.heads}; it must be a multiple of config.{name}.kv_heads "
                        f"({sizes.kv_heads})")
    if sizes.head_dim % 2:
        raise UserError(f"config.{name}.head_dim is {sizes.head_dim}; an even number is expected, for the rotary positions")


# What can be done with prompts that have no answers to prefer or to imitate, and with answers that have no better or worse one
# beside them; the other sources go with every stage.
_STAGES_OF_SOURCE = {
    "arithmetic": ("pretrain", "ppo", "evaluate", "report"),
    "prompts_jsonl": ("ppo", "evaluate", "report"),
    "judgements_jsonl": ("pretrain", "dpo", "evaluate", "report"),
}


def _check_preference(config: Config) -> None:
    section = config.preference
    if "preference" not in config.stages:
        return
    if section.margin_weight and config.data.source == "world":
        raise UserError(f"config.preference.margin_weight is {section.margin_weight} but the pairs of the embedded world have "
                        "no margins; leave it at 0, or set config.data.source to 'preferences_jsonl'")
    if section.members == 1 and section.combine != "mean":
        raise UserError(f"config.preference.combine is {section.combine!r} but config.preference.members is 1; one model's "
                        "score is all there is: set members to at least 2, or leave combine at 'mean'")


def _check_distill(config: Config) -> None:
    """The student's sizes. Those of an outside teacher are known only once it is read."""
    if "reward_distill" not in config.stages:
        return
    model, student = config.model, config.reward_distill
    _check_heads("reward_distill", student)
    if student.samples % 2:
        raise UserError(f"config.reward_distill.samples is {student.samples}; answers are compared two by two, so it must be "
                        "even")
    if student.start == "random" or model.source == "huggingface":
        return
    for name in ("embed", "heads", "kv_heads", "head_dim", "mlp"):
        own, teachers = getattr(student, name), getattr(model, name)
        if own != teachers:
            raise UserError(f"config.reward_distill.{name} is {own} and config.model.{name} is {teachers}; with start "
                            "'teacher' they must be equal: set it so, or start from 'random'")
    if student.layers > model.layers:
        raise UserError(f"config.reward_distill.layers is {student.layers}; with start 'teacher' it must be at most "
                        f"config.model.layers ({model.layers})")


def _check_data(config: Config) -> None:
    _check_mixture(config)
    source = config.data.source
    if source.endswith("_jsonl") and not config.data.train:
        rows = {"preferences_jsonl": 'dialogues, each row with "chosen" and "rejected"',
                "judgements_jsonl": 'judged answers, each row with "prompt", "completion" and "label"',
                "prompts_jsonl": 'prompts, each row with "prompt" and the columns that the reward reads'}[source]
        raise UserError(f"config.data.source is {source!r} but config.data.train is empty; set it to a JSONL file (.gz too) of "
                        f"{rows}")
    allowed = _STAGES_OF_SOURCE.get(source, config.stages)
    for stage in config.stages:
        if stage not in allowed:
            raise UserError(f"stage {stage} has nothing to learn from with config.data.source {source!r}; set config.stages to "
                            f"some of {', '.join(allowed)}")
    if source == "prompts_jsonl" and config.model.source == "scratch":
        raise UserError("config.data.source is 'prompts_jsonl', which has no text to make a tokenizer and a base from; set "
                        "config.model.source to 'huggingface'")
    if config.data.style == "chat" and config.model.source == "scratch":
        raise UserError("config.data.style is 'chat', the chat template of a pretrained model, but config.model.source is "
                        "'scratch'; set it to 'huggingface', or the style to 'compact'")
    if config.data.style == "chat" and source == "world":
        raise UserError("config.data.style is 'chat' but config.data.source is 'world', whose stages speak in compact markers; "
                        "set data.source to a file of yours, or the style to 'compact'")
    if source == "world" and config.world.held_out_topics >= config.world.topics:
        raise UserError(f"config.world.held_out_topics is {config.world.held_out_topics}; it must be below "
                        f"config.world.topics ({config.world.topics}), so that some are left to learn from")


def _check_mixture(config: Config) -> None:
    data = config.data
    files = 1 + len(data.extra_train)
    if data.extra_train and data.source != "preferences_jsonl":
        raise UserError(f"config.data.extra_train is {data.extra_train} but config.data.source is {data.source!r}; set it to "
                        "'preferences_jsonl', or leave extra_train empty")
    if data.weights and data.source != "preferences_jsonl":
        raise UserError(f"config.data.weights is {data.weights} but config.data.source is {data.source!r}; set it to "
                        "'preferences_jsonl', or leave weights empty")
    if data.weights and len(data.weights) != files:
        raise UserError(f"config.data.weights has {len(data.weights)} numbers for {files} files (config.data.train and "
                        "config.data.extra_train); give one for each, or none")
    if any(weight <= 0 for weight in data.weights):
        raise UserError(f"config.data.weights is {data.weights}; every weight must be above 0: leave out a file that is not "
                        "to be used")


_UNUSED = {"adamw": (), "lion": ("eps", "eps_inside"), "muon": ("eps_inside",), "adafactor": ("b1", "b2", "eps", "eps_inside"),
           "sophia": ("eps_inside",)}


def _check_optimizers(config: Config) -> None:
    """A setting that the chosen kind does not read is refused."""
    usual = type(config)()
    for stage in config.stages:
        section = getattr(config, stage, None)
        for name in ("optimizer", "critic_optimizer"):
            chosen = getattr(section, name, None)
            if chosen is not None and chosen.kind == "sophia" and config.model.attention != "plain":
                raise UserError(f"config.{stage}.{name}.kind is 'sophia', which needs second derivatives, and fused attention "
                                "has none: set config.model.attention to 'plain'")
            for unused in () if chosen is None else _UNUSED[chosen.kind]:
                value, default = getattr(chosen, unused), getattr(getattr(getattr(usual, stage), name), unused)
                if value != default:
                    raise UserError(f"config.{stage}.{name}.{unused} is {value}, which {chosen.kind} does not read: leave it "
                                    f"at {default}")


def _check_lengths(config: Config) -> None:
    """A response must leave room for a prompt before it."""
    for stage in config_mesh.GENERATING:
        if stage in config.stages:
            tokens = getattr(config, stage).max_new_tokens
            if tokens >= config.model.max_length:
                raise UserError(f"config.{stage}.max_new_tokens is {tokens}; it must be below config.model.max_length "
                                f"({config.model.max_length}), which holds the prompt too")
    for stage in ("revise", "compare", "online_dpo"):
        tokens = config.feedback.max_reasoning_tokens
        if stage in config.stages and config.feedback.reasoning and tokens >= config.model.max_length:
            raise UserError(f"config.feedback.max_reasoning_tokens is {tokens}; it must be below "
                            f"config.model.max_length ({config.model.max_length}), which holds the dialogue too")
    for stage in ("preference", "dpo"):
        longest = getattr(config, stage).max_length
        if stage in config.stages and longest > config.model.max_length:
            raise UserError(f"config.{stage}.max_length is {longest}; it must be at most config.model.max_length "
                            f"({config.model.max_length})")


def _check_controller(config: Config) -> None:
    """A step of the adaptive controller takes off at most a fifth of batch / horizon; the whole would leave nothing."""
    ppo = config.ppo
    if "ppo" in config.stages and ppo.kl_controller == "adaptive" and ppo.batch >= 5 * ppo.kl_horizon:
        raise UserError(f"config.ppo.kl_horizon is {ppo.kl_horizon}; with the adaptive controller it must be above a "
                        f"fifth of config.ppo.batch ({ppo.batch})")


def _check_dpo(config: Config) -> None:
    """What an objective, or each part of a sum, asks of the other fields of its section."""
    if not {"dpo", "online_dpo"}.intersection(config.stages):
        return
    dpo, parts = config.dpo, config.dpo.objective.split("+")
    if config.data.source == "judgements_jsonl" and dpo.objective != "kto":
        raise UserError(f"config.dpo.objective is {dpo.objective!r}, which learns from pairs; config.data.source "
                        "'judgements_jsonl' has single answers: set dpo.objective to 'kto', or data.source to "
                        "'preferences_jsonl'")
    alone = [part for part in parts if part in ("kto", "orpo", "cpo", "simpo")]
    if alone and len(parts) > 1:
        raise UserError(f"config.dpo.objective is {dpo.objective!r}; {alone[0]!r} cannot be part of a sum: DPO and its "
                        "relatives can")
    if dpo.weights and len(dpo.weights) != len(parts):
        raise UserError(f"config.dpo.weights has {len(dpo.weights)} entries; config.dpo.objective {dpo.objective!r} has "
                        f"{len(parts)}: give one weight each, or none")
    if any(weight < 0 for weight in dpo.weights):
        raise UserError(f"config.dpo.weights is {dpo.weights}; a weight must be at least 0")
    if dpo.weights and len(parts) == 1:
        raise UserError(f"config.dpo.weights is {dpo.weights}; objective {dpo.objective!r} is no sum: leave it empty")
    if dpo.label_smoothing and alone:
        raise UserError(f"config.dpo.label_smoothing is {dpo.label_smoothing}; objective {dpo.objective!r} has no such "
                        "setting: leave it at 0")
    smoothed = [part for part in parts if part in ("conservative", "robust", "exo_pair")]
    if smoothed and dpo.label_smoothing == 0:
        raise UserError(f"config.dpo.label_smoothing is 0; objective {smoothed[0]!r} needs it above 0 (0.1, say)")
    if any(part.startswith("aot") for part in parts) and dpo.micro_batch_tokens:
        raise UserError(f"config.dpo.micro_batch_tokens is {dpo.micro_batch_tokens}; objective {dpo.objective!r} sorts the "
                        "whole batch, which is computed at once: leave it at 0")
    if "online_dpo" not in config.stages:
        return
    if dpo.objective == "kto":
        raise UserError("config.dpo.objective is 'kto', which learns from single answers; stage online_dpo has pairs: "
                        "choose another")
    if config.data.source != "world":
        raise UserError("stage online_dpo asks the labeller about fresh pairs, which knows the embedded world alone; "
                        "leave it out of config.stages or set config.data.source to 'world'")


def _check_ppo(config: Config) -> None:
    """What the choices of the RL stage ask of each other."""
    if "ppo" not in config.stages:
        return
    ppo = config.ppo
    _check_reward(config)
    if ppo.missing_eos == "penalty" and ppo.missing_eos_value < 0:
        raise UserError(f"config.ppo.missing_eos is 'penalty' and config.ppo.missing_eos_value is {ppo.missing_eos_value}; "
                        "it is subtracted from the score, so it must be at least 0")
    if ppo.dual_clip is not None and ppo.policy_loss != "clip":
        raise UserError(f"config.ppo.dual_clip is {ppo.dual_clip}, which belongs to policy_loss 'clip'; it is "
                        f"{ppo.policy_loss!r}: leave dual_clip at None")
    if ppo.clip > 1:
        raise UserError(f"config.ppo.clip is {ppo.clip}; a ratio cannot fall below 1 - clip, so it must be at most 1")
    if ppo.batch % ppo.group_size:
        raise UserError(f"config.ppo.batch is {ppo.batch} responses; it must be a multiple of config.ppo.group_size "
                        f"({ppo.group_size})")
    if ppo.advantages in ("rloo", "grpo") and ppo.group_size < 2:
        raise UserError(f"config.ppo.group_size is {ppo.group_size}; advantages {ppo.advantages!r} compare the responses to "
                        "one prompt, so at least 2 are needed")
    if ppo.skip_equal_groups and ppo.group_size < 2:
        raise UserError("config.ppo.skip_equal_groups is set but config.ppo.group_size is 1: every group would be equal")
    if ppo.kl_in == "loss" and ppo.kl_estimator == "k1" and ppo.kl_coef > 0:
        raise UserError("config.ppo.kl_in is 'loss' and config.ppo.kl_estimator is 'k1', whose gradient is 0 on average: "
                        "the policy would not be held back; choose k2, k3, abs or full")
    if 0 < ppo.micro_batch_tokens <= ppo.max_new_tokens:
        raise UserError(f"config.ppo.micro_batch_tokens is {ppo.micro_batch_tokens}; a prompt and config.ppo.max_new_tokens "
                        f"({ppo.max_new_tokens}) must fit: raise it, or set it to 0")
    if ppo.overlong_buffer > ppo.max_new_tokens:
        raise UserError(f"config.ppo.overlong_buffer is {ppo.overlong_buffer}; it must be at most config.ppo.max_new_tokens "
                        f"({ppo.max_new_tokens})")
    if ppo.critic_warmup >= ppo.iterations:
        raise UserError(f"config.ppo.critic_warmup is {ppo.critic_warmup}; it must be below config.ppo.iterations "
                        f"({ppo.iterations}), or the policy never learns")
    has_critic = ppo.advantages in ("gae", "reinforce", "vtrace")
    if ppo.critic_warmup and not has_critic:
        raise UserError(f"config.ppo.critic_warmup is {ppo.critic_warmup}; advantages {ppo.advantages!r} have no critic")
    if ppo.critic == "shared" and not has_critic:
        raise UserError(f"config.ppo.critic is 'shared'; advantages {ppo.advantages!r} have no critic: leave it at 'separate'")
    if ppo.critic == "shared" and ppo.critic_warmup:
        raise UserError(f"config.ppo.critic_warmup is {ppo.critic_warmup}; a value head on the policy's trunk cannot learn "
                        "without the policy: set ppo.critic to 'separate'")
    if ppo.sampler_correction != "none" and ppo.advantages == "vtrace":
        raise UserError(f"config.ppo.sampler_correction is {ppo.sampler_correction!r}; advantages 'vtrace' correct for "
                        "the sampler themselves: leave it at 'none'")
    if ppo.sampler_correction == "none" and (ppo.correction_level != "token" or ppo.correction_cap != 2.0):
        raise UserError("config.ppo.correction_level or correction_cap is set but config.ppo.sampler_correction is 'none', so "
                        "nothing is corrected: set it to 'truncate' or 'mask'")


def _check_reward(config: Config) -> None:
    """Every part of the reward must have what it needs."""
    reward, parts = config.reward, config.reward.source.split("+")
    if reward.weights and len(reward.weights) != len(parts):
        raise UserError(f"config.reward.weights has {len(reward.weights)} entries; config.reward.source {reward.source!r} has "
                        f"{len(parts)}: give one weight each, or none")
    learnt = not {"preference", "distilled"}.isdisjoint(parts)
    if config.ppo.score_clip is not None and not learnt and "model" not in parts:
        raise UserError(f"config.ppo.score_clip is {config.ppo.score_clip}; it clips a reward model's scores, and "
                        f"config.reward.source is {reward.source!r}: leave score_clip at None")
    if ("model" in parts) != bool(reward.model):
        mend = "set model to its folder" if "model" in parts else "set source to 'model', or leave model empty"
        raise UserError(f"config.reward.model is {reward.model!r} but config.reward.source is {reward.source!r}; {mend}")
    if "callable" not in parts and reward.callable:
        raise UserError(f"config.reward.callable is {reward.callable!r} but config.reward.source is "
                        f"{reward.source!r}; set source to 'callable', or leave callable empty")
    if reward.while_sampling and not {"callable", "verifier"} & set(parts):
        raise UserError(f"config.reward.while_sampling is True, for a callable or a verifier, but config.reward.source is "
                        f"{reward.source!r}: leave it at False")
    place, _, name = reward.callable.rpartition(":")
    if "callable" in parts and not (place and name):
        raise UserError(f"config.reward.callable is {reward.callable!r}; with config.reward.source 'callable' set it to "
                        "'package.module:function' or 'FILE.py:function'")
    if learnt and config.data.source in _STAGES_OF_SOURCE:
        raise UserError(f"config.reward.source is {reward.source!r}; with config.data.source {config.data.source!r} there is "
                        "no preference model: set it to 'verifier', 'callable' or 'model'")
    if "verifier" in parts and reward.verifier == "regex_match" and config.data.source == "arithmetic":
        raise UserError("config.reward.verifier is 'regex_match', which reads a column of patterns; arithmetic has answers: "
                        "use 'number_match' or 'exact_match'")
    if reward.length_free and not reward.length_coef:
        raise UserError(f"config.reward.length_free is {reward.length_free} but config.reward.length_coef is 0, so no token "
                        "costs anything: set length_coef, or leave length_free at 0")
    if "verifier" in parts and config.data.source not in ("arithmetic", "prompts_jsonl"):
        raise UserError(f"config.reward.source is {reward.source!r}; the prompts of config.data.source {config.data.source!r} "
                        "have no wanted answers to verify: set data.source to 'arithmetic' or 'prompts_jsonl'")
    if "ai_feedback" not in parts:
        return
    if config.data.source != "world":
        raise UserError("config.reward.source 'ai_feedback' asks the base for ratings, which it learns in the embedded world "
                        "alone; set config.data.source to 'world', or another reward")
    if config.model.source == "scratch" and not config.world.ratings:
        raise UserError("config.reward.source is 'ai_feedback' but config.world.ratings is 0: the base never sees an answer "
                        "rated; set world.ratings to 0.1, say")
    if config.feedback.reasoning and config.feedback.max_reasoning_tokens >= config.model.max_length:
        raise UserError(f"config.feedback.max_reasoning_tokens is {config.feedback.max_reasoning_tokens}; it must be below "
                        f"config.model.max_length ({config.model.max_length}), which holds the dialogue too")
