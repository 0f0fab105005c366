"""A run's programs, compiled for devices that need not be here: memory, work and traffic by the compiler's own account.

    topology = parse_topology("v5e:4x4")
    sharding = Sharding(make_mesh(..., devices=topology_devices(topology)))
    policy = policy_model(config, sharding, shape="Llama-3.1-8B")
    found = compile_run(config, policy, usable=topology.usable)

Every figure is of one device. Nothing is run, and no weight or tokenizer is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxalign.config import Config
from jaxalign.models.model import Model
from jaxalign.placement.hlo import Collective


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device. peak: the most at once, while the program runs: arguments, results that take no argument's place
    (outputs less aliased), temporaries and the program's code."""

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporary + self.code


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """One jitted step of a run as the compiler sees it.

    stage, phase, role: as "ppo", "update", "policy, critic"; phase is one of sampling, prefill, decode, scoring, reward,
      update, resharding.
    seconds: of lowering and compiling.
    memory: None where the compiler refused; `refusal` has its first lines then, else it is "".
    flops, bytes_accessed: of one device, by the compiler's cost analysis. It counts the body of a loop once.
    collectives: what the devices send each other, those in a loop counted as often as it turns.
    resident: bytes by role of what lies on the device meanwhile and is no argument of the program.
    usable: bytes that a device has for all; None where that is not known.
    warnings: sentences about surprises.
    """

    stage: str
    phase: str
    role: str
    seconds: float
    memory: Memory | None
    refusal: str
    flops: float
    bytes_accessed: float
    collectives: tuple[Collective, ...]
    resident: dict[str, int]
    usable: int | None
    warnings: tuple[str, ...]

    @property
    def total(self) -> int | None:
        """Bytes in use at the program's peak, what is resident beside it included; None where the compiler refused."""
        return None if self.memory is None else self.memory.peak + sum(self.resident.values())

    @property
    def fits(self) -> bool:
        """Whether the compiler took it, and what lies beside it has room too."""
        return self.memory is not None and (self.usable is None or self.total <= self.usable)


def compile_run(
    config: Config,
    policy: Model,
    *,
    prompt: int | None = None,
    usable: int | None = None,
    programs: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> list[CompiledProgram]:
    """Compiles every jitted step of the run's stages, one after another (minutes for large models).

    Args:
      config: the checked config; its stages say which programs there are.
      policy: the run's model (`shapes.policy_model`), with a Sharding on topology devices or on any others.
      prompt: tokens of the longest prompt; by default what model.max_length leaves beside ppo.max_new_tokens.
      usable: bytes of one device's memory (`Topology.usable`).
      programs: only those whose "stage phase" contains one of these; empty: all.
      progress: told of each program before it is compiled ("ppo update").
    """
    raise NotImplementedError
