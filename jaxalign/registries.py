"""The registries: records that a config or an argument selects by name, built in or added with `REGISTRY.register(record)`.

tests/extending/plugins/ has an example of each registry's records.
"""

from jaxalign.registry.advantages import ADVANTAGES, AdvantageEstimator
from jaxalign.registry.data_sources import DATA_SOURCES, DataSourceRecord
from jaxalign.registry.families import FAMILIES, Family
from jaxalign.registry.judges import JUDGES, JudgeRecord
from jaxalign.registry.objectives import OBJECTIVES, Objective
from jaxalign.registry.policy_losses import POLICY_LOSSES, PolicyLoss
from jaxalign.registry.rewards import REWARDS, RewardSource
from jaxalign.registry.samplers import SAMPLERS, SamplerRecord
from jaxalign.registry.stages import STAGES, StageRecord
from jaxalign.registry.trackers import TRACKERS, TrackerRecord

__all__ = [
    "ADVANTAGES", "DATA_SOURCES", "FAMILIES", "JUDGES", "OBJECTIVES", "POLICY_LOSSES", "REWARDS", "SAMPLERS", "STAGES",
    "TRACKERS", "AdvantageEstimator", "DataSourceRecord", "Family", "JudgeRecord", "Objective", "PolicyLoss", "RewardSource",
    "SamplerRecord", "StageRecord", "TrackerRecord",
]
