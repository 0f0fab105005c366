"""Every jitted step of a run with the shapes of its arguments, for the compiler.

The functions and their static arguments are those that the stages use. Two properties of the data are assumed: the number of
steps, which changes only constants of a schedule, and the length of prompts, which is the maximum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxalign.config import Config, Preference
from jaxalign.errors import UserError
from jaxalign.feedback.speaker import next_logprobs
from jaxalign.models.adapters.lora import join, trained
from jaxalign.models.adapters.quantised import quantise_abstract
from jaxalign.models.model import Model, Params
from jaxalign.parallel.shapes import Shapes
from jaxalign.planner.judges import planned_judges
from jaxalign.registry.judges import stage_judge
from jaxalign.registry.stages import policies_before
from jaxalign.rewards.scorer import Ensemble, Scorer
from jaxalign.rollout.decode import decode_chunk
from jaxalign.rollout.layouts import prefill_sizes, single, slot_counts
from jaxalign.rollout.ring import insert, prefill, reroll
from jaxalign.rollout.sampling import Sampling, section_sampling
from jaxalign.rollout.session import STEPS as CHUNK

STEPS = 1000
"""Assumed steps of a schedule with a length that depends on the data."""
STOP_IDS = (2,)


@dataclasses.dataclass(frozen=True)
class Program:
    """One jitted step.

    Attributes:
      stage, phase, role: such as "ppo", "update", "policy, critic".
      step: the jitted function.
      arguments: its arguments in order, a tuple or a NamedTuple; arrays are ShapeDtypeStructs with shardings.
      held: all arrays on the devices while it runs, by role, including the arguments.
      turns: the maximum number of iterations of its data-dependent loop.
    """

    stage: str
    phase: str
    role: str
    step: Callable
    arguments: tuple
    held: Mapping[str, Any]
    turns: int = 1

    @property
    def name(self) -> str:
        return f"{self.stage} {self.phase} ({self.role})"

    def lower(self):
        return self.step.lower(*self.arguments)


@dataclasses.dataclass(frozen=True)
class Run:
    """The run that the programs belong to. prompt: tokens of the longest prompt; None: model.max_length minus the response."""

    config: Config
    policy: Model
    prompt: int | None = None

    @property
    def shapes(self) -> Shapes:
        """The shapes of arrays on the policy's mesh."""
        return Shapes(self.policy.sharding)

    @functools.cached_property
    def frozen(self) -> Params | None:
        """The frozen base under adapters, as stored (`lora.base`); None without adapters."""
        return None if self.policy.lora is None else quantise_abstract(self.policy.base.abstract(), self.config.lora.base)

    @property
    def base(self) -> dict[str, Any]:
        """The arrays that every stage holds, by role: the base under adapters."""
        return {} if self.frozen is None else {"base": self.frozen}

    def judges(self, stage: str) -> bool:
        """Whether the judge of a stage runs the base model on the run's devices."""
        return stage_judge(self.config, stage).runs_base

    def judging(self, stage: str, model: Model, params) -> list[tuple[str, Model, Any, int]]:
        """(role, model, weights, length of the longest request and text) of each judge on the devices in a stage.

        model, params: the base.
        """
        if self.judges(stage):
            return [("feedback model", model, params, self.config.judge.local_length(self.config))]
        return [tuple(judge) for judge in planned_judges(self.config, stage, self.policy.sharding)]

    def outside_judges(self, stage: str) -> dict[str, Any]:
        """The weights of the models of config.judge.path that a stage holds, by role."""
        return {judge.role: judge.params for judge in planned_judges(self.config, stage, self.policy.sharding)}

    def start(self, stage: str, trained: bool = False) -> Params:
        """The weights that a stage starts from: those of lora.path or an earlier stage, or the base.

        trained: whether they are those of an earlier stage, whichever stages `config.stages` has before this one.
        """
        made = trained or self.config.lora.path or policies_before(self.config.stages, stage)
        if self.frozen is None or made:
            return join(self.frozen, self.policy.abstract())
        return self.frozen

    def own(self, params: Params) -> Params:
        """The joined parameters without the base's parameters."""
        return params if self.frozen is None else {name: x for name, x in params.items() if name not in self.frozen}

    def prompt_length(self, new_tokens: int) -> int:
        """Tokens of the longest prompt before a response of `new_tokens`. Raises UserError if both do not fit max_length."""
        room = self.config.model.max_length - new_tokens
        if room < 1 or (self.prompt or 1) > room:
            raise UserError(f"prompts of {self.prompt or 1} tokens and responses of {new_tokens} exceed "
                            f"config.model.max_length ({self.config.model.max_length}); raise it, or shorten the prompt")
        return self.prompt or room

    def rows(self, dtype, *shape: int, sampling: bool = False) -> jax.ShapeDtypeStruct:
        """An array split over its first dimension, the batch, as in training or, with `sampling`, as in the sampling engine."""
        return (Shapes(self.policy.sharding.generation) if sampling else self.shapes).rows(dtype, *shape)

    def scalar(self, dtype=jnp.float32, shape: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct:
        """An array that is replicated on every device."""
        return self.shapes.whole(dtype, *shape)

    def key(self) -> jax.ShapeDtypeStruct:
        found = jax.eval_shape(lambda: jax.random.key(0))
        return self.scalar(found.dtype)


def sampling_programs(run: Run, stage: str, role: str, model: Model, params, section, batch: int, held) -> list[Program]:
    """The programs of the sampling engine: resharding the weights if needed, decoding a chunk with the largest ring, prefill,
    entering and widening the ring, and one step of decoding without the head.

    section: a config section with temperature, top_k, top_p and max_new_tokens.
    """
    N, own = section.max_new_tokens, model.generation
    P = run.prompt_length(N)
    moving, params, moved = resharding(stage, role, model, params, held)
    held = {**held, **moved}
    rows = functools.partial(run.rows, sampling=True)
    parts = own.sharding.batch_size
    count = prefill_sizes(P, parts, batch // parts)[1] * parts
    slots = slot_counts(P + N)[-1]
    cache, half, made = (own.abstract_cache(*size) for size in ((batch, slots), (batch, -(-slots // 2)), (count, P)))
    row, prompts, slot = rows(jnp.int32, batch), rows(jnp.int32, count, P), run.scalar(jnp.int32)
    step = (params, row, row, (cache,), slot)
    plan, index = rows(jnp.int32, parts, 1, batch // parts, 3), rows(jnp.int32, parts, batch // parts)
    chunk = _chunk(run, stage, "sampling", role, model, params, section_sampling(section, STOP_IDS), cache, held)
    return [
        *moving,
        chunk,
        Program(stage, "prefill", role, prefill, (own, params, prompts), {**held, "KV cache": cache}),
        Program(stage, "entering", role, insert, (own, (cache,), made, plan, slot), held),
        Program(stage, "widening", role, reroll, (own, (half,), index, slot, single(batch // parts, slots)), held),
        Program(stage, "decode", role, decode_step(own), step, held),
    ]


def _chunk(run: Run, stage: str, phase: str, role: str, model: Model, params, sampling: Sampling, cache, held) -> Program:
    """Decoding of a chunk of tokens for all rows of `cache`."""
    own, B = model.generation, cache[0].values.shape[1]
    rows = jax.ShapeDtypeStruct((4, B), jnp.int32, sharding=own.sharding.named((None, "batch")))
    control = run.key(), run.scalar(jnp.int32, (3,)), run.scalar()
    arguments = (own, params, (cache,), rows, *control, sampling.compiled, CHUNK)
    return Program(stage, phase, role, decode_chunk, arguments, held, CHUNK)


def resharding(stage: str, role: str, model: Model, params, held) -> tuple[list[Program], Params, dict[str, Any]]:
    """(the programs that reshard weights for sampling, the resharded weights, the arrays that they add, by role).

    Large weights move one after another; the weights moved earlier are already on the devices."""
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    leaves, structure = jax.tree.flatten(params)
    targets, programs, moved = jax.tree.leaves(model.generation_abstract(params)), [], []
    for group, step in model.generation_moves(params):
        what = f"{role}, {names[group[0]]}" if len(group) == 1 and len(leaves) > 1 else role
        given = ([leaves[i] for i in group],)
        programs.append(Program(stage, "resharding", what, step, given, {**held, "weights moved before": tuple(moved)}))
        moved += [targets[i] for i in group]
        for i in group:
            leaves[i] = targets[i]
    return programs, jax.tree.unflatten(structure, leaves), {f"{role} for sampling": moved} if moved else {}


def judging_programs(run: Run, stage: str, model: Model, params, batch: int, held) -> list[Program]:
    """The programs of the judges on the devices: their reasoning, if they reason, and the log-probs of the options.

    Args:
      run: the run.
      stage: the stage.
      model, params: the run's base, the judge unless the config names other models.
      batch: the rows that a judge reads together.
      held: the arrays on the devices, including those of the judges of `Run.outside_judges`.
    """
    found: list[Program] = []
    for role, own, weights, length in run.judging(stage, model, params):
        asked = (own, weights, run.rows(jnp.int32, batch, length - 1), run.rows(jnp.int32, batch), run.scalar(jnp.int32, (2,)))
        labelling = Program(stage, "labelling", role, next_logprobs, asked, held)
        feedback = run.config.feedback
        if feedback.reasons(run.config):
            N = feedback.max_reasoning_tokens
            sampling = Sampling(N, STOP_IDS, feedback.reasoning_temperature)
            found += judge_sampling(run, stage, "reasoning", (role, own, weights, length), sampling, batch, held)
        found.append(labelling)
    return found


def judge_sampling(run: Run, stage: str, phase: str, judge: tuple, sampling: Sampling, batch: int, held) -> list[Program]:
    """The programs with which a judge, one of `Run.judging`, samples text."""
    role, model, params, length = judge
    moving, params, moved = resharding(stage, role, model, params, held)
    cache = model.generation.abstract_cache(batch, slot_counts(length)[-1])
    return [*moving, _chunk(run, stage, phase, role, model, params, sampling, cache, {**held, **moved})]


def stacked_members(section: Preference, scorer: Scorer, params: Params) -> tuple[Scorer, Params]:
    """The scorer and its weights; an ensemble if preference.members > 1. Each leaf of an ensemble is [K, ...], except the base
    that members with adapters share."""
    K = section.members
    if K == 1:
        return scorer, params
    ensemble = Ensemble((0.0,) * K, (1.0,) * K, section.combine, section.std_weight)

    def stack(leaf: jax.ShapeDtypeStruct):
        here = NamedSharding(leaf.sharding.mesh, PartitionSpec(None, *leaf.sharding.spec))
        return jax.ShapeDtypeStruct((K, *leaf.shape), leaf.dtype, sharding=here)

    own = trained(params) if "adapters" in params else params
    return dataclasses.replace(scorer, ensemble=ensemble), {**params, **jax.tree.map(stack, own)}


@functools.cache
def decode_step(model: Model) -> Callable:
    """One step of the engine's loop without the LM head and the draw. It donates the cache, as the loop does."""
    return jax.jit(model.decode, donate_argnums=3)


FROZEN = ("reference", "preference model", "student", "reward model", "feedback model", "judge")
"""Roles that `mesh.offload` with "frozen" keeps in host memory, except while a program reads them."""


def offloaded(run: Run, programs: list[Program]) -> list[Program]:
    """The programs, with `held` reduced by the arrays that `training/offload.py` keeps in host memory while they run."""
    out = run.config.mesh.offload

    def stays(role: str, phase: str) -> bool:
        if role.endswith(" optimizer"):
            return "optimizer" not in out or phase == "update"
        return "frozen" not in out or role.rstrip(" 0123456789") not in FROZEN

    def left(program: Program) -> Program:
        held = {role: tree for role, tree in program.held.items() if stays(role, program.phase)}
        return dataclasses.replace(program, held=held)

    return [left(program) for program in programs]


def device_bytes(tree) -> int:
    """Bytes on one device of a pytree of ShapeDtypeStructs."""
    return sum(_leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _leaf_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape)
    bits = 4 if leaf.dtype in (jnp.uint4, jnp.int4) else np.dtype(leaf.dtype).itemsize * 8
    return -(-int(np.prod(shape)) * bits // 8)
