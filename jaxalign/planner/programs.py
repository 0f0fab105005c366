"""The tasks of a run, which the arithmetic estimate reads, with their jitted programs, for the compiler.

The functions and their static arguments are those that the stages use. Two properties of the data are assumed: the number of
steps, which changes only constants of a schedule, and the length of prompts, which is the maximum. The programs of a task are
built only on demand: they need a mesh of devices, and a search for a mesh estimates many runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.config import Config, rounds
from jaxalign.errors import UserError
from jaxalign.feedback.text_generator import WANTED, next_logprobs
from jaxalign.models.adapters.lora import join
from jaxalign.models.adapters.quantised import quantise_abstract
from jaxalign.models.model import Model, Params
from jaxalign.parallel.device_memory import stored_bytes
from jaxalign.parallel.shapes import Shapes
from jaxalign.planner.judges import LABELLER, PlannedJudge, outside_judges
from jaxalign.planner.memory import BatchShape
from jaxalign.registry.judges import stage_judge
from jaxalign.registry.stages import policies_before, stages_in_order
from jaxalign.rl.ahead import described_moves
from jaxalign.rollout.layouts import prefill_sizes, single, slot_counts
from jaxalign.rollout.ring import decode_program, decoding_options, insert, prefill, reroll
from jaxalign.rollout.sampling import Sampling, section_sampling
from jaxalign.rollout.session import STEPS as CHUNK
from jaxalign.steps.packed import pair_rows, part_rows, rows_split

STEPS = 1000
"""Assumed steps of a schedule with a length that depends on the data."""
STOP_IDS = (2,)


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
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


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of work of a stage, which one call of its programs does.

    Attributes:
      stage: the stage's name.
      phase: "generate", "score", "update" or, for scoring by a reward model, "reward".
      runs: the roles with models that run in the task.
      rows: the rows of one call; for an update, of one optimizer step. None: the arithmetic estimate leaves the task out.
      calls: calls in the whole run; None if the number depends on unknown data.
      stays: the roles with weights on the devices during the task, including `runs`.
      counted: positions of a row at which the LM head is computed; 0 if the task does not use it.
      trains: the subset of `runs` that is trained.
      micro: the number of micro-batches of an update.
      packed: whether the update packs its rows, so that the number of micro-batches is known only when it runs. The program
        then sums gradients even if there is only one.
      steps: optimizer steps in one call.
      unit: the number of rows that must stay in one micro-batch: 2 for pairs.
      fused: the role of each model that also runs in the task's program, and whose work another task counts.
      programs: a function that returns the task's programs.
    """

    stage: str
    phase: str = ""
    runs: tuple[str, ...] = ()
    rows: BatchShape | None = None
    calls: int | None = None
    stays: tuple[str, ...] = ()
    counted: int = 0
    trains: tuple[str, ...] = ()
    micro: int = 1
    packed: bool = False
    steps: int = 1
    unit: int = 1
    fused: tuple[str, ...] = ()
    programs: Callable[[], Sequence[PlannedProgram]] = dataclasses.field(default=tuple, compare=False)

    @property
    def name(self) -> str:
        return f"{self.stage} {self.phase}" + (f" ({self.runs[0]})" if self.runs[0].startswith("judge") else "")

    @property
    def tokens(self) -> int:
        """Tokens of one call: the sampled tokens if the task generates, else the tokens that it reads."""
        return self.rows.rows * (self.rows.new or self.rows.length) * self.steps


@dataclasses.dataclass(frozen=True)
class Run:
    """The run that the tasks belong to.

    Attributes:
      config: the run's config.
      policy: the run's model; its sharding is on a mesh of devices or, if no programs are built, on an abstract mesh.
      prompt: tokens of the longest prompt; None: model.max_length minus the response.
      examples: rows or pairs of the data file; None if unknown.
    """

    config: Config
    policy: Model
    prompt: int | None = None
    examples: int | None = None

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

    @functools.cached_property
    def base_params(self) -> Params:
        """The weights of the run's base."""
        return self.policy.abstract() if self.frozen is None else self.frozen

    def judges(self, stage: str) -> list[PlannedJudge]:
        """The judges of a stage on the run's devices."""
        if stage_judge(self.config, stage).runs_base:
            return [PlannedJudge(LABELLER, self.policy, self.config.judge.local_length(self.config), lambda: self.base_params)]
        return outside_judges(self.config, stage, self.policy.sharding)

    def judge_weights(self, judges: Sequence[PlannedJudge]) -> dict[str, Params]:
        """The weights of judges, by their roles in programs; without the base under adapters, which every stage holds."""
        return {judge.title: self.own(judge.params) if judge.role == LABELLER else judge.params for judge in judges}

    def start(self, stage: str, trained: bool = False) -> Params:
        """The weights that a stage starts from: those of lora.path or an earlier stage, or the base.

        trained: whether they are those of an earlier stage, whichever stages `config.stages` has before this one.
        """
        if self.frozen is None or trained or self.config.lora.path or policies_before(self.config.stages, stage):
            return join(self.frozen, self.policy.abstract())
        return self.frozen

    def own(self, params: Params) -> Params:
        """The joined parameters without the base's parameters."""
        return params if self.frozen is None else {name: x for name, x in params.items() if name not in self.frozen}

    def longest_prompt(self, new_tokens: int) -> int:
        """Tokens of the longest prompt before a response of `new_tokens`.

        Raises:
          UserError: the prompt and the response do not fit model.max_length.
        """
        room = self.config.model.max_length - new_tokens
        if room < 1 or (self.prompt or 1) > room:
            raise UserError(f"prompts of {self.prompt or 1} tokens and responses of {new_tokens} exceed "
                            f"config.model.max_length ({self.config.model.max_length}); raise it, or shorten the prompt")
        return self.prompt or room

    def part(self, sequences: int, T: int, tokens: int = 0) -> tuple[BatchShape, int]:
        """(the packed rows of a micro-batch, the number of micro-batches) for sequences that all have T tokens.

        tokens: the maximum number of tokens per device in a micro-batch; 0 selects a default.
        """
        rows, parts = part_rows(sequences, T, tokens, *rows_split(self.policy.sharding))
        return BatchShape(rows, T), parts

    def pair_part(self, pairs: int, T: int, tokens: int = 0, whole: bool = False) -> tuple[BatchShape, int]:
        """`part` for pairs of sequences, which stay in one micro-batch. whole: whether all pairs are in one micro-batch."""
        rows, parts = pair_rows(pairs, T, tokens, *rows_split(self.policy.sharding), whole)
        return BatchShape(rows, T), parts

    def rows(self, dtype, *shape: int, sampling: bool = False) -> jax.ShapeDtypeStruct:
        """An array split over its first dimension, the batch, as in training or, with `sampling`, as in the sampling engine."""
        return (Shapes(self.policy.sharding.generation) if sampling else self.shapes).rows(dtype, *shape)

    def scalar(self, dtype=jnp.float32, shape: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct:
        """An array that is replicated on every device."""
        return self.shapes.whole(dtype, *shape)


def run_tasks(run: Run, only: Collection[str] | None = None) -> list[Task]:
    """The tasks of config.stages, or of those in `only`, in order, from the stages' registry records.

    The calls of a stage that every round repeats (`config.rounds`) are those of all rounds.
    """
    loaded = [record.load("programs") for record in stages_in_order(run.config.stages)
              if only is None or record.name in only]
    tasks = [task for programs in loaded if programs is not None for task in programs(run)]
    if run.config.rounds == 1:
        return tasks
    repeated = rounds.repeated_stages(run.config)
    calls = [task.calls and task.calls * (run.config.rounds if task.stage in repeated else 1) for task in tasks]
    return [dataclasses.replace(task, calls=count) for task, count in zip(tasks, calls, strict=True)]


def estimated_tasks(run: Run, only: Collection[str] | None = None) -> list[Task]:
    """The tasks of `run_tasks` that the arithmetic estimate counts."""
    return [task for task in run_tasks(run, only) if task.rows is not None]


def calls_for(total: float | None, batch: int) -> int | None:
    """The number of calls for `total` rows in batches of `batch`; None if the total is unknown."""
    return None if total is None else math.ceil(total / batch)


def update_task(stage: str, trains: tuple[str, ...], packed: tuple[BatchShape, int], calls: int | None,
                programs: Callable[[], Sequence[PlannedProgram]], stays: tuple[str, ...] = (), **options) -> Task:
    """An update over the micro-batches `packed`, as `Run.part` returns them. options: other attributes of `Task`."""
    part, parts = packed
    rows = BatchShape(part.rows * parts, part.length)
    return Task(stage, "update", trains, rows, calls, stays or trains, trains=trains, micro=parts, packed=True,
                programs=programs, **options)


Models = Callable[[], tuple[Model, Params, Mapping[str, Any]]]
"""Returns (the model that samples, its weights, all arrays on the devices by role)."""


def sampling_task(run: Run, stage: str, section, batch: int, calls: int | None, stays: tuple[str, ...], models: Models,
                  role: str = "policy") -> Task:
    """Sampling of `batch` responses by the policy.

    Args:
      run: the run.
      stage: the stage.
      section: a config section with temperature, top_k, top_p and max_new_tokens.
      batch: the responses of one call.
      calls: the number of calls.
      stays: the roles other than the policy that are on the devices.
      models: see `Models`.
      role: the name of the policy in the programs.
    """
    N = section.max_new_tokens

    def programs():
        model, params, held = models()
        return sampling_programs(run, stage, role, model, params, section, batch, held)

    rows = BatchShape(batch, run.longest_prompt(N), N)
    return Task(stage, "generate", ("policy",), rows, calls, ("policy", *stays), 1, programs=programs)


def sampling_programs(run: Run, stage: str, role: str, model: Model, params, section, batch: int, held) -> list[PlannedProgram]:
    """The programs of the sampling engine: resharding the weights if needed, decoding a chunk with the largest ring, prefill,
    entering and widening the ring, and one step of decoding without the head.

    section: a config section with temperature, top_k, top_p and max_new_tokens.
    """
    N, own = section.max_new_tokens, model.generation
    P = run.longest_prompt(N)
    moving, params, moved = resharding(stage, role, model, params, held)
    held = {**held, **moved}
    rows = functools.partial(run.rows, sampling=True)
    parts = own.sharding.batch_size
    count = prefill_sizes(P, parts, batch // parts, own.sharding.platform)[1] * parts
    slots = slot_counts(P + N)[-1]
    cache, half, prefilled = (own.abstract_cache(*size) for size in ((batch, slots), (batch, -(-slots // 2)), (count, P)))
    row, prompts, slot = rows(jnp.int32, batch), rows(jnp.int32, count, P), run.scalar(jnp.int32)
    step = (params, row, row, (cache,), slot)
    plan, index = rows(jnp.int32, parts, 1, batch // parts, 3), rows(jnp.int32, parts, batch // parts)
    chunk = _chunk(run, stage, "sampling", role, model, params, section_sampling(section, STOP_IDS), cache, held)
    options = tuple((decoding_options(own, params) or {}).items())
    return [
        *moving,
        chunk,
        PlannedProgram(stage, "prefill", role, prefill, (own, params, prompts), {**held, "KV cache": cache}),
        PlannedProgram(stage, "entering", role, insert, (own, (cache,), prefilled, plan, slot), held),
        PlannedProgram(stage, "widening", role, reroll, (own, (half,), index, slot, single(batch // parts, slots)), held),
        PlannedProgram(stage, "decode", role, _decode_step(own, options), step, held),
    ]


def _chunk(
    run: Run, stage: str, phase: str, role: str, model: Model, params, sampling: Sampling, cache, held
) -> PlannedProgram:
    """Decoding of a chunk of tokens for all rows of `cache`."""
    own, B = model.generation, cache[0].values.shape[1]
    where = own.sharding.named((None, "batch"))
    variant = sampling.variant(jax.random.key_impl(jax.random.key(0)))
    rows = jax.ShapeDtypeStruct((4 + variant.fields(len(sampling.stop_ids)), B), jnp.int32, sharding=where)
    arguments = (own, params, (cache,), rows, run.scalar(jnp.int32, (3,)), variant, CHUNK)
    return PlannedProgram(stage, phase, role, decode_program(own, params), arguments, held, CHUNK)


def resharding(stage: str, role: str, model: Model, params, held) -> tuple[list[PlannedProgram], Params, dict[str, Any]]:
    """(the programs that reshard weights for sampling, the resharded weights, the arrays that they add, by role).

    Large weights move one after another; the weights moved earlier are already on the devices."""
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    moves, resharded = described_moves(model, params)
    targets, programs, moved = jax.tree.leaves(resharded), [], []
    for group, step, arguments in moves:
        weight = f"{role}, {names[group[0]]}" if len(group) == 1 and len(names) > 1 else role
        beside = {**held, "weights moved before": tuple(moved)}
        programs.append(PlannedProgram(stage, "resharding", weight, step, arguments, beside))
        moved += [targets[i] for i in group]
    return programs, resharded, {f"{role} for sampling": moved} if moved else {}


def verdict_tasks(run: Run, stage: str, batch: int, judges: Sequence[PlannedJudge], held: Callable[[], Mapping[str, Any]],
                  asked: int = 0, stays: tuple[str, ...] = ()) -> list[Task]:
    """The tasks of judges on the devices: their reasoning, if they reason, and the log-probs of the options.

    Args:
      run: the run.
      stage: the stage.
      batch: the rows that a judge reads together.
      judges: the judges, some of `Run.judges`.
      held: returns the arrays on the devices, including the judges' weights.
      asked: the comparisons that each judge makes.
      stays: the roles on the devices.
    """
    tasks, feedback, calls = [], run.config.feedback, calls_for(asked, batch)

    def labelling(judge: PlannedJudge) -> list[PlannedProgram]:
        ids = run.rows(jnp.int32, batch, judge.length - 1)
        arguments = (judge.model, judge.params, ids, run.rows(jnp.int32, batch), run.scalar(jnp.int32, (WANTED,)))
        return [PlannedProgram(stage, "labelling", judge.title, next_logprobs, arguments, held())]

    for judge in judges:
        if feedback.reasons(run.config):
            sampling = Sampling(feedback.max_reasoning_tokens, STOP_IDS, feedback.reasoning_temperature)
            tasks.append(judge_task(run, stage, "reasoning", judge, sampling, batch, held, calls, stays))
        rows = BatchShape(batch, judge.length)
        programs = functools.partial(labelling, judge)
        tasks.append(Task(stage, "score", (judge.role,), rows, calls, stays, 1, programs=programs))
    return tasks


def judge_task(run: Run, stage: str, phase: str, judge: PlannedJudge, sampling: Sampling, batch: int,
               held: Callable[[], Mapping[str, Any]], calls: int | None, stays: tuple[str, ...]) -> Task:
    """Sampling of a judge's text after its longest request. phase: the phase of the program."""

    def programs():
        moving, params, moved = resharding(stage, judge.title, judge.model, judge.params, held())
        cache = judge.model.generation.abstract_cache(batch, slot_counts(judge.length)[-1])
        everything = {**held(), **moved}
        return [*moving, _chunk(run, stage, phase, judge.title, judge.model, params, sampling, cache, everything)]

    new = sampling.max_new_tokens
    rows = BatchShape(batch, judge.length - new, new)
    if judge.role == LABELLER:
        rows, stays = BatchShape(batch, run.longest_prompt(new), new), tuple(dict.fromkeys((LABELLER, *stays)))
    return Task(stage, "generate", (judge.role,), rows, calls, stays, 1, programs=programs)


@functools.cache
def _decode_step(model: Model, options: tuple[tuple[str, Any], ...]) -> Callable:
    """One step of the engine's loop without the LM head and the draw. It donates the cache, as the loop does. It includes work
    that the loop does once before its steps, such as a copy of the layers."""
    return jax.jit(model.decode, donate_argnums=3, compiler_options=dict(options) or None)


FROZEN = ("reference", "preference model", "student", "reward model", "feedback model", "judge")
"""Roles that `mesh.offload` with "frozen" keeps in host memory, except while a program reads them."""


def offloaded(run: Run, task: Task) -> Task:
    """The task, with `held` of its programs reduced by the arrays that `steps/offload.py` keeps in host memory."""
    out = run.config.mesh.offload

    def stays(role: str, phase: str) -> bool:
        if role.endswith(" optimizer"):
            return "optimizer" not in out or phase == "update"
        return "frozen" not in out or role.rstrip(" 0123456789") not in FROZEN

    def programs():
        for program in task.programs():
            held = {role: tree for role, tree in program.held.items() if stays(role, program.phase)}
            yield dataclasses.replace(program, held=held)

    return dataclasses.replace(task, programs=programs)


def device_bytes(tree) -> int:
    """Bytes on one device of a pytree of ShapeDtypeStructs."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape)
        total += stored_bytes(math.prod(shape), leaf.dtype)
    return total
