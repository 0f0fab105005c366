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
    Config,
    check,
    default_config,
    default_for,
    from_config_dict,
    reset_unread,
    to_dict,
)
from jaxalign.config.schema import field, section
from jaxalign.config.sections.alarms import Alarms
from jaxalign.config.sections.arithmetic import Arithmetic
from jaxalign.config.sections.best_of_n import BestOfN
from jaxalign.config.sections.compare import Compare
from jaxalign.config.sections.data import Data
from jaxalign.config.sections.dpo import Dpo
from jaxalign.config.sections.endpoint import Endpoint
from jaxalign.config.sections.evaluate import Evaluate
from jaxalign.config.sections.feedback import Feedback
from jaxalign.config.sections.judge import Judge
from jaxalign.config.sections.lora import Lora
from jaxalign.config.sections.mesh import Mesh
from jaxalign.config.sections.model import Model
from jaxalign.config.sections.online_dpo import OnlineChecks, OnlineDpo
from jaxalign.config.sections.optimizer import Optimizer
from jaxalign.config.sections.ppo import Checks, Ppo
from jaxalign.config.sections.preference import Preference
from jaxalign.config.sections.pretrain import Pretrain
from jaxalign.config.sections.revise import Revise
from jaxalign.config.sections.reward import Reward
from jaxalign.config.sections.reward_distill import RewardDistill
from jaxalign.config.sections.sft import Sft
from jaxalign.config.sections.tracking import Tracking
from jaxalign.config.sections.world import World
from jaxalign.config.stages import DEFAULT_STAGES

__all__ = [
    "Alarms",
    "Arithmetic",
    "BestOfN",
    "Checks",
    "Compare",
    "Config",
    "DEFAULT_STAGES",
    "Data",
    "Dpo",
    "Endpoint",
    "Evaluate",
    "Feedback",
    "Judge",
    "Lora",
    "Mesh",
    "Model",
    "OnlineChecks",
    "OnlineDpo",
    "Optimizer",
    "Ppo",
    "Preference",
    "Pretrain",
    "Revise",
    "Reward",
    "RewardDistill",
    "Section",
    "Sft",
    "Tracking",
    "World",
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
