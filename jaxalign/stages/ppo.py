"""ppo: reinforcement learning with PPO or one of its variants (config.ppo.advantages).

Each iteration samples responses, scores them with config.reward and updates the policy. The stage reads the weights that RL
starts from (policy and reference) and the inputs of the reward. A critic starts from the preference model if that model or
its student is part of the reward. The stage writes checkpoints, the policy's params, metrics, the step-0 checks and a summary.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence

from jaxalign import streams
from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.models.model import Params
from jaxalign.parallel import hosts
from jaxalign.parallel.ahead import Ahead
from jaxalign.planner.programs import Run
from jaxalign.registry.stages import STAGES, Batch
from jaxalign.rl.checks import Check
from jaxalign.rl.prompts import PromptStream
from jaxalign.rl.state import PPOSetup, critic_from, make_ppo_setup
from jaxalign.rollout.sampler import make_sampler
from jaxalign.stages.shared import alarms, engines, judges, loops, mixes, reads, rewards, run_models, sources
from jaxalign.stages.shared.base import Stage, StageContext, write_json
from jaxalign.stages.shared.keys import stage_key
from jaxalign.tracking.metrics import read_metrics
from jaxalign.trainers.reinforcement import Reinforcement, Roles
from jaxalign.training.checkpoint import load_params, save_params
from jaxalign.training.offload import check_host_memory

CHECKS = "checks.json"


@STAGES.declare(
    "ppo", makes_policy=True, samples=True, uses_sampler=True, trains=True, learns_from=("prompts",),
    batches=(Batch("ppo.batch", ("ppo.minibatches",)),),
    programs="jaxalign.planner.ppo_programs:ppo", workload="jaxalign.planner.stage_workloads:ppo",
    report="jaxalign.tracking.report.training:reinforcement", preview="jaxalign.stages.shared.preview:ppo_rows",
)
class PPO(Stage):
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
        found = reads.base_files(config) | sources.data_files(config) | rewards.reward_files(config)
        if config.ppo.asks_to_compare:
            found |= judges.feedback_files(config, self.name)
        return found | engines.sampler_files(config)

    def run(self, context: StageContext) -> None:
        check_host_memory(context.config.mesh)
        with Ahead() as ahead:
            trainer, shares = self._train(context, ahead)
        self._save(context, trainer)
        write_json(context.directory / "summary.json", self._summary(context) | shares)

    def _train(self, context: StageContext, ahead: Ahead) -> tuple[Reinforcement, dict]:
        """(the finished run, the part of the summary about the prompts)."""
        config, section = context.config, context.config.ppo
        tokenizer = run_models.load_tokenizer(context)
        policy = run_models.make_model(config, tokenizer.vocab_size)
        setup = make_ppo_setup(section, policy)
        sets = sources.prompt_sets(context, tokenizer)
        measured = mixes.held_out_helpful(context, tokenizer, sets) if section.alarms.every else []
        prompts = mixes.stage_prompts(context, tokenizer, self.name, "rl", sets, without=measured)
        shares = mixes.prompt_shares(context, [prompt.source for prompt in prompts])
        ids = [styles.encode_prompt(tokenizer, prompt.messages, config.data.style) for prompt in prompts]
        stream = PromptStream(prompts, ids, section.batch, section.group_size, context.stream_seed, streams.LOADERS["ppo"])
        sampling = engines.sampling(section, tokenizer, config.data.style)
        trainer = Reinforcement(setup, stream, sampling, tokenizer, config.model.max_length)
        checked = hosts.once((context.directory / CHECKS).exists)
        # With offloading, some arguments of the first call are in host memory.
        if config.sampler == "local" and not config.mesh.offload:
            planned = Run(config, setup.reference)
            start = planned.start(self.name, trained=bool(context.start))
            trainer.compile_ahead(ahead, rewards.scores_of(context, setup), planned.frozen, start, checked)
        start = run_models.policy_params(context, policy, self.name)
        frozen = run_models.frozen_params(context, policy)
        roles = Roles(
            rewards.make_reward(context, policy, tokenizer), run_models.frozen_role(context, policy, start),
            lambda start: run_models.trained_params(context, setup.reference, start, self.name),
            lambda start: self._critic(context, setup, start), frozen,
        )
        del start  # The role holds the weights, possibly in host memory.
        steps = trainer.steps(
            roles, functools.partial(loops.loop, context, policy), stage_key(context, self.name),
            make_sampler(config.sampler, trainer.engine, "config.sampler"),
            offload_optimizer="optimizer" in config.mesh.offload, on_checks=functools.partial(write_checks, context),
            alarms=alarms.make_alarms(context, policy, tokenizer, measured) if measured else None,
        )
        for _ in steps:
            pass
        return trainer, shares

    def _save(self, context: StageContext, trainer: Reinforcement) -> None:
        """Saves the stage's parameters: the newest ones, or those of the best measured policy if an alarm ended RL."""
        rows = read_metrics(context.directory / "metrics.jsonl")
        kept, params = alarms.kept_iteration(context, rows), trainer.policy_params
        if kept < len(rows):
            print(f"[{self.name}] the policy after iteration {kept} is kept, since an alarm fired", flush=True)
            params = load_params(alarms.best_folder(context.directory, kept), trainer.setup.reference)
        save_params(context.directory / "params", params)

    def _critic(self, context: StageContext, setup: PPOSetup, start: Params) -> Params:
        """The preference model if it or its student is part of the reward; else the policy's trunk with a zero value head."""
        if rewards.is_learnt(context.config):
            return load_params(context.input_directory("preference") / "params", setup.critic)
        return critic_from(setup, start, stage_key(context, self.name, "critic"))

    def _summary(self, context: StageContext) -> dict:
        rows = read_metrics(context.directory / "metrics.jsonl")
        checks = json.loads((context.directory / CHECKS).read_text(encoding="utf-8"))
        summary = {"iterations": len(rows), "checks": checks, "stopped_early": int(sum(r["stopped_early"] for r in rows))}
        summary |= {"reward_first": rows[0]["reward"], "reward_last": rows[-1]["reward"], "kl_last": rows[-1]["kl_k1"]}
        summary |= {"score_first": rows[0]["score"], "score_last": rows[-1]["score"]}
        summary |= {"sampler_gap_max": max(row["sampler_gap"] for row in rows)}
        return summary | (alarms.summary(context, rows) if context.config.ppo.alarms.every else {})


def write_checks(context: StageContext, checks: Sequence[Check]) -> None:
    """Writes the step-0 checks to the stage's folder."""
    write_json(context.directory / CHECKS, [dataclasses.asdict(check) for check in checks])
