"""The config schema: the type, default, documentation and constraint of every field.

A config file changes some of the defaults:

    from jaxalign.config import default_config

    def get_config():
        config = default_config()
        config.ppo.kl_coef = 0.1
        return config

`python -m jaxalign.config` prints the reference page, docs/config.md. No module in this package imports JAX.
"""

from jaxalign.config.arguments import section_from
from jaxalign.config.base import Section
from jaxalign.config.constraints import above, at_least, between, none_or_some_of, one_of, registered, some_of
from jaxalign.config.root import (
    DEFAULT_STAGES,
    Config,
    check,
    default_config,
    default_for,
    from_config_dict,
    reset_unread,
    to_dict,
)
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
from jaxalign.config.sections.online_dpo import OnlineChecks, OnlineDPOConfig
from jaxalign.config.sections.placement import PlacementConfig
from jaxalign.config.sections.ppo import AlarmsConfig, Checks, PPOConfig
from jaxalign.config.sections.preference import PreferenceConfig
from jaxalign.config.sections.pretrain import PretrainConfig
from jaxalign.config.sections.revise import ReviseConfig
from jaxalign.config.sections.reward import RewardConfig
from jaxalign.config.sections.reward_distill import RewardDistillConfig
from jaxalign.config.sections.sft import SFTConfig
from jaxalign.config.sections.shared import Optimizer
from jaxalign.config.sections.tracking import TrackingConfig
from jaxalign.config.sections.world import WorldConfig

__all__ = [
    "AlarmsConfig",
    "ArithmeticConfig",
    "BestOfNConfig",
    "Checks",
    "CompareConfig",
    "Config",
    "DEFAULT_STAGES",
    "DataConfig",
    "DPOConfig",
    "EndpointConfig",
    "EvaluateConfig",
    "FeedbackConfig",
    "JudgeConfig",
    "Lora",
    "Mesh",
    "ModelConfig",
    "OnlineChecks",
    "OnlineDPOConfig",
    "Optimizer",
    "PPOConfig",
    "PlacementConfig",
    "PreferenceConfig",
    "PretrainConfig",
    "ReviseConfig",
    "RewardConfig",
    "RewardDistillConfig",
    "Section",
    "SFTConfig",
    "TrackingConfig",
    "WorldConfig",
    "above",
    "at_least",
    "between",
    "check",
    "default_config",
    "default_for",
    "field",
    "from_config_dict",
    "none_or_some_of",
    "one_of",
    "registered",
    "reset_unread",
    "section",
    "section_from",
    "some_of",
    "to_dict",
]
