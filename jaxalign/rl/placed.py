"""An iteration of RL with roles on meshes of their own (`config.placement`).

Each role runs a program of its own on its mesh. Programs are dispatched without waiting for each other, so that roles on
different devices run at the same time; results move from device to device. Token ids are on the host between sampling and
scoring, because responses end one by one and rewards may read their text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxalign.models.adapters.lora import join, strip_frozen
from jaxalign.models.model import Model, Params
from jaxalign.parallel.role_meshes import moved, rows_moved
from jaxalign.parallel.rows import fetch
from jaxalign.parallel.sharding import Sharding
from jaxalign.records import Experience, Rollout
from jaxalign.rewards.base import Scored
from jaxalign.rl.arguments import OutputArguments, RoleArguments
from jaxalign.rl.experience import experience_of
from jaxalign.rl.iteration import Iteration, PromptBatch, Scoring
from jaxalign.rl.metrics import ExperienceMetrics, IterationMetrics, UpdateMetrics
from jaxalign.rl.program_times import ProgramTimes, RunProgram
from jaxalign.rl.role_programs import logprobs_of, update_apart, values_of
from jaxalign.rl.state import PPOState
from jaxalign.steps import work
from jaxalign.steps.packed import pack_rollout


class RoleWeights:
    """Weights on the meshes of roles.

    Args:
      shardings: the mesh of each role. A role without one uses that of the role that it shadows.
      frozen: the base under the adapters on the policy's mesh, of which each other mesh gets one copy; None without adapters.
    """

    def __init__(self, shardings: Mapping[str, Sharding], frozen: Params | None):
        self._shardings = shardings
        self._frozen = {shardings["policy"].mesh: frozen}

    def sharding(self, role: str) -> Sharding:
        """The mesh of a role."""
        owner = {"generator": "policy", "value": "critic"}.get(role, role)
        return self._shardings[role] if role in self._shardings else self._shardings[owner]

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that are placed."""
        return tuple(self._shardings)

    def meets(self, first: str, second: str) -> bool:
        """Whether two roles have a device in common."""
        devices = (set(self.sharding(role).mesh.devices.flat) for role in (first, second))
        return bool(set.intersection(*devices))

    def frozen(self, role: str) -> Params | None:
        """The base under the adapters on the mesh of a role."""
        sharding, own = self.sharding(role), self._frozen[self._shardings["policy"].mesh]
        if sharding.mesh not in self._frozen:
            self._frozen[sharding.mesh] = None if own is None else moved(own, sharding)
        return self._frozen[sharding.mesh]

    def on(self, role: str, params: Params, of: str = "policy") -> Params:
        """Parameters of role `of`, joined with the base or not, on the mesh of another role and joined with the base."""
        if self.sharding(of).mesh == self.sharding(role).mesh:
            return join(self.frozen(role), params)
        return join(self.frozen(role), moved(strip_frozen(self.frozen(of), params), self.sharding(role)))

    def on_recorded(self, role: str, params: Params, program: RunProgram, of: str = "policy") -> Params:
        """`on`, with `program` if it copies."""
        if self.sharding(of).mesh == self.sharding(role).mesh:
            return self.on(role, params, of)
        return program("copy of weights", role, lambda: self.on(role, params, of))


class PlacedIteration(Iteration):
    """`Iteration` with roles on meshes of their own. `reference` has its parameters on the mesh of its role.

    Args:
      weights: the weights on the meshes of the roles.
      times: records when programs run; None for no record.
      other arguments: as in `Iteration`; `sampler` samples on the mesh of the generator.
    """

    def __init__(self, *args: Any, weights: RoleWeights, times: ProgramTimes | None = None, **options: Any):
        super().__init__(*args, **options)
        self._weights, self._times = weights, times or ProgramTimes(None, {})
        self.program = self._times.run
        self.fused = None  # The reward runs a program of its own.
        self._later: dict[str, Callable[[], jax.Array]] = {}  # Programs that start after the reward's.

    def __call__(self, state: PPOState, step: int) -> tuple[PPOState, IterationMetrics]:
        with self._times.iteration(step):
            return super().__call__(state, step)

    def update_sampler(self, params: Params, version: int) -> None:
        self.sampler.update(self._weights.on_recorded("generator", params, self.program), version)

    def forward(self, state: PPOState, params: Params, recompute: bool, sampled: Rollout) -> dict[str, jax.Array]:
        """Starts the programs of the reference, of the critic and, with `recompute`, of the policy.

        Those of critic and policy start after the reward's if they share devices with it: with interleave, the reward would
        wait for them, and they for the reference.
        """
        setup, here, starts = self.setup, fetch(sampled), {}
        with self.reference.on_device() as reference:
            outputs = {"reference": self._run("reference", logprobs_of, "reference", setup.reference, reference, here)}
        if setup.runs_critic and setup.shares_trunk:
            starts["values"] = "policy", lambda: self._run("values", values_of, "policy", setup.critic, params, here)
        elif setup.runs_critic:
            critic = self._weights.on_recorded("value", state.critic.params, self.program, "critic")
            starts["values"] = "value", lambda: self._run("values", values_of, "value", setup.critic, critic, here)
        if recompute:
            starts["logprobs"] = "policy", lambda: self._run(
                "log-probabilities", logprobs_of, "policy", setup.policy, params, here)
        self._later = {}
        for name, (role, start) in starts.items():
            if "reward" in self._weights.roles and self._weights.meets(role, "reward"):
                self._later[name] = start
            else:
                outputs[name] = start()
        return outputs

    def _run(self, name: str, function, role: str, model: Model, params: Params, here: Rollout) -> jax.Array:
        sharding = self._weights.sharding(role)
        rollout, parts = pack_rollout(here, self.setup.config.micro_batch_tokens, sharding)
        given = RoleArguments(
            model=model.on(sharding), temperature=self.setup.config.temperature or 1.0, params=params, rollout=rollout,
            parts=parts,
        )
        return self.program(name, role, lambda: function(given))

    def begin_next(self, params: Params, state: PPOState, step: int, scored: bool) -> Callable[[], Rollout] | None:
        """On devices of its own, the generator samples in a thread.

        If other roles score on its devices, it begins after them: two threads would start their programs in different orders.
        """
        shared = [role for role in self._weights.roles if role != "generator" and self._weights.meets("generator", role)]
        if self.ahead is None or step + 1 >= self.setup.config.iterations or (shared and not scored):
            return None
        if {"policy", "critic"} & set(shared):
            return super().begin_next(params, state, step, scored)
        batch, key = self.stream.at(step + 1), self._key(state, step + 1)
        self.update_sampler(params, step)  # A copy: the update donates the policy's weights.
        pool = ThreadPoolExecutor(1, "generate")
        waiting = pool.submit(self.respond, batch, key, self.sampling)
        pool.shutdown(wait=False)  # The thread ends after its only task.
        return lambda: self._finished(waiting)

    def _finished(self, waiting: Future[Rollout]) -> Rollout:
        with self.timeline.phase("generate") as phase:
            rollout = waiting.result()
            phase.tokens, phase.flops = work.sampled(self.setup.reference, rollout)
            return rollout

    def scored(self, sampled: Rollout, batch: PromptBatch) -> Scored:
        scored = super().scored(sampled, batch)
        return Scored(*rows_moved(tuple(scored), self.setup.policy.sharding))

    def experience(self, state: PPOState, params: Params, given: Scoring) -> tuple[Experience, ExperienceMetrics]:
        setup = self.setup
        outputs = given.outputs | {name: start() for name, start in self._later.items()}
        outputs, baseline = rows_moved((outputs, given.baseline), setup.policy.sharding)
        arguments = OutputArguments(
            setup=setup, outputs=outputs, kl_coef=state.kl_coef, rollout=given.sampled, scores=given.scored.scores,
            kept=given.kept, baseline=baseline,
        )
        needs = ("reference", "reward", "values", "log-probabilities")
        return self.program("advantages", "policy", lambda: experience_of(arguments), needs)

    def check_start(self, state: PPOState, sampled: Rollout, experience: Experience) -> None:
        with self.reference.on_device() as reference:
            here = self._weights.on("policy", reference, "reference")  # A copy, until the checks end.
            self.monitor.step_zero(state, sampled, experience, here, self.frozen)

    def run_update(self, state: PPOState, experience: Experience) -> tuple[PPOState, UpdateMetrics]:
        if not self.setup.critic_apart:
            return super().run_update(state, experience)
        frozen = self.frozen, self._weights.frozen("critic")
        with self.read_in_update() as reference:
            return update_apart(self.setup, state, experience, frozen, strip_frozen(self.frozen, reference), self.program)
