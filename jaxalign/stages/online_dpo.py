"""online_dpo: direct preference optimisation on pairs of the policy's own answers, sampled and labelled in each iteration.

With one update per iteration this is online DPO (Guo et al. 2024, arXiv 2402.04792). With several updates, and the policy at
the start of the iteration as the reference, it is iterative DPO. Reads the base (the labeller) and its starting weights
(policy and reference). Writes checkpoints, params, metrics, one shard of labelled pairs per iteration, the step-0 check and a
summary.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np

from jaxalign import streams
from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.data.loader import EpochLoader
from jaxalign.feedback.labeller import Labeller, Pair
from jaxalign.models.adapters.lora import join
from jaxalign.models.model import Model, Params
from jaxalign.parallel import hosts
from jaxalign.parallel.rows import place_rows
from jaxalign.records import Rollout
from jaxalign.registry.stages import STAGES, Batch
from jaxalign.rl.arguments import SamplerArguments
from jaxalign.rl.checks import act_on, gap_check, gradients_check, sampler_difference, unexplained
from jaxalign.stages.shared import engines, judges, loops, reads, run_models, sources
from jaxalign.stages.shared.base import Stage, StageContext, write_json
from jaxalign.stages.shared.keys import stage_key
from jaxalign.stages.shared.labelled import comparison_row
from jaxalign.stages.shared.shards import Shards
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.timing import Timeline
from jaxalign.trainers.answers import answer_pairs
from jaxalign.trainers.online_direct import OnlineUpdates
from jaxalign.training import work
from jaxalign.training.checkpoint import save_params
from jaxalign.training.metrics import OnlineDirectMetrics
from jaxalign.training.offload import FrozenRole, check_host_memory
from jaxalign.training.optimizer import make_optimizer
from jaxalign.training.state import TrainState, abstract_state, init_state

CHECKS = "checks.json"


@STAGES.declare(
    "online_dpo", makes_policy=True, samples=True, uses_sampler=True, trains=True, learns_from=("prompts",),
    asks_judge=("compare",), batches=(Batch("online_dpo.batch", ("online_dpo.minibatches",)),),
    programs="jaxalign.planner.stage_programs:online_dpo",
    workload="jaxalign.planner.stage_workloads:online_dpo",
    report="jaxalign.tracking.report.training:direct",
)
class OnlineDPO(Stage):
    name = "online_dpo"
    config_fields = (
        *reads.MODEL_FIELDS,
        *reads.PROMPT_FIELDS,
        *reads.LABEL_FIELDS,
        *("feedback.invert", "feedback.undecided", "sampler", "online_dpo", "dpo.objective", "dpo.weights"),
        *("dpo.beta", "dpo.label_smoothing", "dpo.margin", "dpo.sft_weight", "dpo.reference", "dpo.micro_batch_tokens"),
    )

    def inputs(self, config: Config) -> tuple[str, ...]:
        judge = judges.judge_stages(config, self.name)
        return tuple(dict.fromkeys((*reads.base_stages(config), *reads.policy_stages(config, self.name), *judge)))

    def files(self, config: Config):
        found = reads.base_files(config) | sources.data_files(config) | judges.feedback_files(config, self.name)
        return found | engines.sampler_files(config)

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.online_dpo
        check_host_memory(config.mesh)
        tokenizer = run_models.load_tokenizer(context)
        model = run_models.make_model(config, tokenizer.vocab_size)
        reference = run_models.frozen_role(context, model, run_models.policy_params(context, model, self.name))
        timeline = Timeline()
        meter = loops.Meter(timeline, model)
        judge = judges.make_judge(context, self.name, model, section.batch, meter, trains=True)
        labeller = judges.make_labeller(context, judge)
        iteration = _Iteration(context, model, reference, labeller, tokenizer, timeline, meter)
        updates = iteration.updates
        loop = loops.loop(
            context, model, section.iterations, section.checkpoint_every, shown=("loss", "decided", "kl"), timeline=timeline
        )

        def init() -> TrainState:
            with reference.on_device() as start:
                params = run_models.trained_params(context, model, start, self.name)
            return updates.rest(init_state(model, updates.optimizer, params, stage_key(context, self.name)))

        state = loop.run(init, updates.rest(abstract_state(model, updates.optimizer)), iteration)
        save_params(context.directory / "params", state.params)
        rows = read_metrics(context.directory / "metrics.jsonl")
        decided = sum(row["decided"] for row in rows)
        summary = {"iterations": len(rows), "pairs": len(rows) * section.batch, "decided": int(decided)}
        if hosts.once((context.directory / CHECKS).exists):  # Absent if an older version started the run.
            summary["checks"] = json.loads((context.directory / CHECKS).read_text(encoding="utf-8"))
        write_json(context.directory / "summary.json", summary | {"kl_last": rows[-1]["kl"], "loss_last": rows[-1]["loss"]})


class _Iteration:
    """One step of the loop: sample two answers to each prompt, label them, then run the updates."""

    def __init__(
        self,
        context: StageContext,
        model: Model,
        reference: FrozenRole,
        labeller: Labeller,
        tokenizer,
        timeline: Timeline,
        meter: loops.Meter,
    ):
        config, section = context.config, context.config.online_dpo
        self.frozen, self.checks_path = run_models.frozen_params(context, model), context.directory / CHECKS
        self.timeline, self.meter = timeline, meter
        self.context, self.config = context, config
        self.model, self.start, self.labeller, self.tokenizer = model, reference, labeller, tokenizer
        self.prompts = sources.prompts(context, tokenizer, "rl", section.prompts, section.max_new_tokens)
        self.encoded = [styles.encode_prompt(tokenizer, p.messages, config.data.style) for p in self.prompts]
        self.loader = EpochLoader(len(self.prompts), section.batch, context.stream_seed, streams.LOADERS["online_dpo"])
        optimizer = make_optimizer(section.optimizer, section.iterations * section.epochs * section.minibatches)
        offloads = "optimizer" in config.mesh.offload
        self.updates = OnlineUpdates(model, optimizer, section, config.dpo, self.frozen, context.stream_seed, offloads)
        self.shards = Shards(context.directory)
        self.size = section.batch // section.minibatches
        longest = max(len(prompt) for prompt in self.encoded)
        # All iterations pad prompts to the same length, so that sampling compiles once.
        sampling, bucket = engines.sampling(section, tokenizer, config.data.style), -(-longest // 8) * 8
        self.sampler = engines.policy_sampler(config, model, 2 * self.size, sampling, bucket)

    def __call__(self, state: TrainState, step: int) -> tuple[TrainState, OnlineDirectMetrics]:
        section = self.config.online_dpo
        index = self.loader.indices(step)
        params = join(self.frozen, state.params)
        self.sampler.update(params, step)
        parts = [
            self._collect(params, index[first : first + self.size], step * section.batch + first)
            for first in range(0, section.batch, self.size)
        ]
        self.shards.write(step, [comparison_row(comparison) for _, labelled, _ in parts for comparison in labelled])
        pairs = jax.tree.map(lambda *x: np.concatenate(x), *(batch for batch, _, _ in parts))
        measured = [metrics for _, _, metrics in parts]
        means = {name: float(np.mean([row[name] for row in measured])) for name in ("kl", "length")}
        totals = {name: sum(row[name] for row in measured) for name in ("decided", "tokens")}
        with self.timeline.phase("update") as phase:  # Blocking is free here: sampling needs the result.
            state, learnt = jax.block_until_ready(self.updates.run(state, pairs, step))
            phase.tokens = section.epochs * int(pairs.length.sum())
            phase.flops = section.epochs * work.learning_pairs(self.model, pairs)
        what = f"share of the updates of iteration {step} whose gradient is not finite"
        act_on((gradients_check(float(unexplained(learnt)), what),), section.checks, "online_dpo")
        return state, OnlineDirectMetrics(**means, **totals, update=learnt)

    def _check(self, params: Params, sampled: Rollout) -> None:
        """Compares the sampler's and the trainer's log-probabilities on the first rollout of the run."""
        section = self.config.online_dpo
        found = sampler_difference(SamplerArguments(
            model=self.model, temperature=section.temperature, params=params, rollout=sampled
        ))
        checks = (gap_check(float(found.gap), section.sampler_tolerance),)
        write_json(self.checks_path, [dataclasses.asdict(check) for check in checks])
        act_on(checks, section.checks, "online_dpo")

    def _collect(self, params: Params, index, first_row: int):
        """(pairs with their reference log-probs as numpy, comparisons, metrics by name) for the prompts `index`.

        Args:
          first_row: the global number of the first prompt.
        """
        # One call samples both answers to a prompt, at neighbouring global rows.
        rows = range(2 * first_row, 2 * (first_row + len(index)))
        key = stage_key(self.context, "online_dpo", "samples")
        twice = [self.encoded[i] for i in index for _ in range(2)]
        with self.timeline.phase("generate") as phase:
            rollout = self.sampler.rollout(twice, key, rows)
            phase.tokens, phase.flops = work.sampled(self.model, rollout)
        if first_row == 0:
            self._check(params, place_rows(self.model.sharding, rollout))
        texts = styles.response_texts(self.tokenizer, rollout, self.config.data.style)
        pairs = [Pair(self.prompts[i], texts[2 * n], texts[2 * n + 1]) for n, i in enumerate(index)]
        key = stage_key(self.context, "online_dpo", "labels")
        with self.meter.phase("label"):
            labelled = self.labeller.label(pairs, key, first_row, self.config.feedback.invert)
        answered = answer_pairs(rollout, labelled, self.config.feedback.undecided)
        every = dataclasses.replace(answered, weight=np.ones_like(answered.weight))
        with self.timeline.phase("score") as phase:
            with self.start.on_device() as reference:
                start = self.updates.logprobs(reference, every)
            now = self.updates.logprobs(params, every)
            phase.tokens, phase.flops = 2 * int(every.length.sum()), 2 * work.reading_pairs(self.model, every)
        metrics = {
            "decided": float(sum(c.decided for c in labelled)),
            "kl": float(np.mean(now - start)),
            "length": float(np.mean(rollout.response_length)),
            "tokens": int(rollout.response_length.sum()),
        }
        reference = {"start": start, "iteration": now, "none": 0 * start}[self._reference]
        return dataclasses.replace(answered, reference=reference), labelled, metrics

    @property
    def _reference(self) -> str:
        return "none" if self.config.dpo.reference == "none" else self.config.online_dpo.reference
