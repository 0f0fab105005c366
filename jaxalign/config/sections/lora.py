"""Low-rank adapters."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import above, between, one_of
from jaxalign.config.reading import unless
from jaxalign.config.schema import field, require_valid
from jaxalign.errors import UserError

_ADAPTED = unless("rank", 0, "above 0")


@dataclasses.dataclass(frozen=True)
class Lora(Section):
    """Low-rank adapters on the frozen base, in every stage that trains a policy, a critic or a preference model."""

    rank: int = field(0, "Rank of each adapter; 0 trains all weights.", between(0, 65536))
    alpha: float = field(32.0, "Adapter outputs are multiplied by alpha / rank.", above(0), _ADAPTED)
    targets: tuple[str, ...] = field(("*",), 'Linear layers with an adapter: patterns for the names "attention.query" ... '
                                     '"mlp.down", or "q_proj" ... "down_proj".', None, _ADAPTED)
    rank_stabilised: bool = field(False, "rsLoRA: scale by alpha / sqrt(rank) instead of alpha / rank.", None, _ADAPTED)
    dora: bool = field(False, "DoRA: train the magnitude of each weight vector separately.", None, _ADAPTED)
    base: str = field("float32", "Storage format of the frozen base. int8 has one scale per output; nf4 has 4 bits per weight "
                      "and one scale per 64 inputs.", one_of("float32", "bfloat16", "int8", "nf4"))
    path: str = field("", "PEFT folder (adapter_config.json, adapter_model.safetensors) that the policy and the reference "
                      "start from, for model.source=huggingface. It determines rank, alpha, targets and kind; leave these "
                      "fields at their defaults.")

    def __post_init__(self) -> None:
        require_valid(self, "Lora")

    def check(self, config: WholeConfig, name: str) -> None:
        if self.base != "float32" and not self.rank and not self.path:
            raise UserError(f"config.lora.base is {self.base!r} but config.lora.rank is 0, which trains the base itself; set "
                            "rank above 0, or base to 'float32'")
        if not self.path:
            return
        if config.model.source != "huggingface":
            raise UserError(f"config.lora.path is {self.path!r} but config.model.source is {config.model.source!r}; a PEFT "
                            "adapter belongs to a Hugging Face model: set model.source to 'huggingface', or leave lora.path "
                            "empty")
        for entry in dataclasses.fields(self):
            value, usual = getattr(self, entry.name), entry.default
            if entry.name not in ("path", "base") and value != usual:
                raise UserError(f"config.lora.{entry.name} is {value!r} but config.lora.path is set, and its "
                                f"adapter_config.json determines {entry.name}; leave {entry.name} at {usual!r}")
