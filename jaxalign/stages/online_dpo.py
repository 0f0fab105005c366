"""online_dpo: direct preference optimisation on pairs of the policy's own answers, sampled and labelled in each iteration.

With one update per iteration this is online DPO (Guo et al. 2024, arXiv 2402.04792). With several updates, and the policy at
the start of the iteration as the reference, it is iterative DPO. Reads the base (the labeller) and its starting weights
(policy and reference). Writes checkpoints, params, metrics, one shard of labelled pairs per iteration, the step-0 check and a
summary.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.feedback.labeller import Pair
from jaxalign.records import Comparison
from jaxalign.registry.stages import STAGES, Batch
from jaxalign.stages.shared import engines, judges, reads, run_models, sources
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.stages.shared.builtin import BuiltinStage
from jaxalign.stages.shared.labelled import comparison_row
from jaxalign.stages.shared.placements import online_dpo_placement
from jaxalign.stages.shared.shards import Shards
from jaxalign.stages.shared.training import policy_inputs
from jaxalign.steps.checkpoint import save_params
from jaxalign.steps.offload import check_host_memory
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.timing import Timeline
from jaxalign.tracking.workdir import read_object
from jaxalign.trainers.base import CHECKS
from jaxalign.trainers.online_direct import OnlineDPO, OnlineDPOParts


@STAGES.declare(
    "online_dpo", makes_policy=True, samples=True, uses_sampler=True, trains=True, learns_from=("prompts",), windows=True,
    asks_judge=("compare",), batches=(Batch("online_dpo.batch", ("online_dpo.minibatches",)),),
    programs="jaxalign.planner.stage_programs:online_dpo",
    report="jaxalign.tracking.report.training:direct",
)
class OnlineDPOStage(BuiltinStage):
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

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.online_dpo
        check_host_memory(config.mesh)
        tokenizer = run_models.load_tokenizer(context)
        model = run_models.make_model(config, tokenizer.vocab_size)
        placed = online_dpo_placement(context, model)
        model, judging = placed.model("policy", model), placed.model("judge", model)
        timeline, shards = Timeline(), Shards(context.directory)
        meter = engines.Meter(timeline, model)
        judge = judges.make_judge(context, self.name, judging, section.batch, meter, trains=True)
        labeller = judges.make_labeller(context, judge)
        sets = sources.prompt_sets(context, tokenizer)
        prompts = sources.prompts(context, tokenizer, "rl", section.prompts, section.max_new_tokens, sets)
        ids = [styles.encode_prompt(tokenizer, prompt.messages, config.data.style) for prompt in prompts]

        def label(pairs: Sequence[Pair], key: jax.Array, first: int) -> list[Comparison]:
            with meter.phase("label"):
                return labeller.label(pairs, key, first, config.feedback.invert)

        parts = OnlineDPOParts(
            tokenizer, config.data.style, engines.sampling(section, tokenizer, config.data.style), config.model.max_length,
            objective=config.dpo,
            label=label,
            undecided=config.feedback.undecided,
            write=lambda iteration, pairs: shards.write(iteration, [comparison_row(pair) for pair in pairs]),
            timeline=timeline,
            sampler=config.sampler,
            offload=config.mesh.offload,
            shardings=placed.shardings,
        )
        trainer = OnlineDPO.from_parts(policy_inputs(context, model, shared=True), section, parts)
        for _ in trainer.fit_encoded(prompts, ids):
            pass
        save_params(context.directory / "params", trainer.params)
        rows = read_metrics(context.directory / "metrics.jsonl")
        decided = sum(row["decided"] for row in rows)
        summary = {"iterations": len(rows), "pairs": len(rows) * section.batch, "decided": int(decided)}
        summary["checks"] = read_object(context.directory / CHECKS, list)
        summary |= {"kl_last": rows[-1]["kl"], "loss_last": rows[-1]["loss"]}
        write_json(context.directory / "summary.json", summary | placed.values | sources.data_summary(sets))
