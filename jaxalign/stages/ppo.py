"""ppo: reinforcement learning with PPO or one of its variants (config.ppo.advantages).

Each iteration samples responses, scores them with config.reward and updates the policy. The stage reads the weights that RL
starts from (policy and reference) and the inputs of the reward. A critic starts from the preference model if that model or
its student is part of the reward. The stage writes checkpoints, the policy's params, metrics, the step-0 checks and a summary.
"""

from __future__ import annotations

import math

from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.planner.programs import Run
from jaxalign.registry.rewards import reward_records
from jaxalign.registry.stages import STAGES, Batch
from jaxalign.stages.shared import alarms, engines, judges, reads, rewards, run_models, sources
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.stages.shared.breakdown import prompt_shares
from jaxalign.stages.shared.builtin import BuiltinStage
from jaxalign.stages.shared.placements import ppo_placement
from jaxalign.stages.shared.training import policy_inputs
from jaxalign.steps.checkpoint import load_params, save_params
from jaxalign.steps.offload import check_host_memory
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.workdir import read_object
from jaxalign.trainers.base import CHECKS
from jaxalign.trainers.ppo import PPO
from jaxalign.trainers.ppo_parts import PPOParts


@STAGES.declare(
    "ppo", makes_policy=True, samples=True, uses_sampler=True, trains=True, learns_from=("prompts",), windows=True,
    batches=(Batch("ppo.batch", ("ppo.minibatches",)),),
    programs="jaxalign.planner.ppo_programs:ppo",
    report="jaxalign.tracking.report.training:reinforcement", preview="jaxalign.stages.shared.preview:ppo_rows",
)
class PPOStage(BuiltinStage):
    name = "ppo"
    config_fields = (
        *reads.MODEL_FIELDS, "data", "world", "arithmetic", "preference.max_length", "reward", "ppo", *reads.LABEL_FIELDS,
        "sampler",
    )

    def inputs(self, config: Config) -> tuple[str, ...]:
        read = rewards.reward_stages(config)
        base = [stage for stage in read if stage in reads.base_stages(config)]
        judge = judges.judge_stages(config, self.name) or reads.base_stages(config) if config.ppo.asks_to_compare else ()
        return tuple(dict.fromkeys((*base, *reads.policy_stages(config, self.name), *read, *judge)))

    def files(self, config: Config):
        paths = super().files(config) | rewards.reward_files(config)
        return paths | (judges.feedback_files(config, self.name) if config.ppo.asks_to_compare else {})

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.ppo
        check_host_memory(config.mesh)
        tokenizer = run_models.load_tokenizer(context)
        policy = run_models.make_model(config, tokenizer.vocab_size)
        placed = ppo_placement(context, policy)
        policy, scoring, valuing = (placed.model(role, policy) for role in ("policy", "reward", "critic"))
        sets = sources.prompt_sets(context, tokenizer)
        measured = sources.held_out_helpful(context, tokenizer, sets) if section.alarms.every else []
        prompts = sources.stage_prompts(context, tokenizer, self.name, "rl", sets, without=measured)
        shares = prompt_shares(context, [prompt.source for prompt in prompts])
        ids = [styles.encode_prompt(tokenizer, prompt.messages, config.data.style) for prompt in prompts]

        learnt = any(record.learnt for record in reward_records(config.reward.source))
        preference = context.input_directory("preference") / "params"
        parts = PPOParts(
            tokenizer, engines.sampling(section, tokenizer, config.data.style), config.model.max_length,
            reward=lambda: rewards.make_reward(context, scoring, tokenizer),
            critic=(lambda: load_params(preference, valuing.with_head("scalar"))) if learnt else None,
            sampler=config.sampler, sampler_name="config.sampler",
            scores=rewards.scores_of(context, policy) if config.sampler == "local" else None,
            abstract_start=Run(config, policy).start(self.name, trained=bool(context.start)),
            offload=config.mesh.offload,
            alarms=(lambda: alarms.make_alarms(context, policy, tokenizer, measured)) if measured else None,
            shardings=placed.shardings,
        )
        trainer = PPO.from_parts(policy_inputs(context, policy, shared=True), section, parts)
        for _ in trainer.fit_encoded(prompts, ids):
            pass
        self._save(context, trainer)
        summary = self._summary(context) | shares | placed.values | sources.data_summary(sets)
        write_json(context.directory / "summary.json", summary)

    def _save(self, context: StageContext, trainer: PPO) -> None:
        """Saves the stage's parameters: the newest ones, or those of the best measured policy if an alarm ended RL."""
        rows = read_metrics(context.directory / "metrics.jsonl")
        kept, params = alarms.kept_iteration(context, rows), trainer.params
        if kept < len(rows):
            print(f"[{context.title}] the policy after iteration {kept} is kept, since an alarm fired", flush=True)
            params = load_params(alarms.best_folder(context.directory, kept), trainer.inputs.model)
        save_params(context.directory / "params", params)

    def _summary(self, context: StageContext) -> dict:
        rows = read_metrics(context.directory / "metrics.jsonl")
        checks = read_object(context.directory / CHECKS, list)
        summary = {"iterations": len(rows), "checks": checks, "stopped_early": int(sum(r["stopped_early"] for r in rows))}
        ends = {"reward_first": rows[0]["reward"], "reward_last": rows[-1]["reward"], "kl_last": rows[-1]["kl_k1"],
                "score_first": rows[0]["score"], "score_last": rows[-1]["score"],
                "ended_share_first": rows[0]["eos_rate"], "ended_share_last": rows[-1]["eos_rate"]}
        # JSON has no NaN, the means of an iteration in which no response has a score.
        summary |= {name: None if math.isnan(value) else value for name, value in ends.items()}
        summary |= {"sampler_gap_max": max(row["sampler_gap"] for row in rows if "sampler_gap" in row)}
        return summary | (alarms.summary(context, rows) if context.config.ppo.alarms.every else {})
