"""preference: trains the preference model on soft labels and measures its accuracy and calibration on held-out pairs.

Reads compare (world) or the preference file, and the weights that RL starts from. Writes checkpoints, params and a summary with
the shift and scale that normalise its scores to mean 0 and standard deviation 1 on the training pairs. With `members` above 1
it trains an ensemble: the first member is written where a single model would be, the others to member-1, member-2, and so on.
"""

from __future__ import annotations

import dataclasses

from jaxalign import streams
from jaxalign.algorithms.rewards import score_statistics
from jaxalign.config import Config
from jaxalign.data.loader import EpochLoader
from jaxalign.models.model import Model, Params, scalar_from_lm
from jaxalign.parallel import hosts
from jaxalign.records import PairBatch
from jaxalign.rewards.scorer import Scorer, stack_members
from jaxalign.stages.shared import loops, reads, run_models, sources
from jaxalign.stages.shared.base import Stage, StageContext, write_json
from jaxalign.stages.shared.keys import stage_key
from jaxalign.stages.shared.labelled import preference_split, print_report
from jaxalign.stages.shared.training import run_settings, start_from
from jaxalign.trainers.preference_quality import measure
from jaxalign.trainers.reward_model import Member, make_ensemble, member_directory
from jaxalign.trainers.scoring import all_scores, pair_arrays
from jaxalign.training.checkpoint import save_params


class Preference(Stage):
    name = "preference"
    config_fields = (*reads.MODEL_FIELDS, "data", "world", "preference", "feedback.undecided")

    def inputs(self, config: Config) -> tuple[str, ...]:
        return (*reads.policy_stages(config, self.name), *sources.made_in(config, "compare"))

    def files(self, config: Config):
        return reads.base_files(config) | sources.data_files(config)

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.preference
        tokenizer = run_models.load_tokenizer(context)
        policy = run_models.make_model(config, tokenizer.vocab_size)
        pairs, held_out_pairs, report = preference_split(context, tokenizer)
        extra = print_report(context.title, report)
        train, held_out = (
            pair_arrays(tokenizer, part, config.data.style, section.max_length, section.margin_weight)
            for part in (pairs, held_out_pairs)
        )
        first = streams.LOADERS[self.name]
        loaders = [sources.pair_loader(context, pairs, section.batch, first + number) for number in range(section.members)]
        members = [self._train(context, policy, train, loader, number) for number, loader in enumerate(loaders)]
        scorer, params = Scorer(policy.with_head("scalar")), members[0]
        if len(members) > 1:
            scorer, found = make_ensemble(section, scorer.model, members, train, held_out)
            params, extra = stack_members(members), extra | found
        samples = all_scores(scorer, params, train, section.batch)
        shift, scale = (float(x) for x in score_statistics(samples.reshape(-1)))
        summary = {"steps": loaders[0].steps(section.epochs), "train_pairs": len(train.label)}
        summary |= {"reward_mean_before": shift, "reward_std_before": scale}
        summary |= {"shift": shift, "scale": scale} if section.normalise else {"shift": 0.0, "scale": 1.0}
        summary |= measure(all_scores(scorer, params, held_out, section.batch), held_out, section.temperature_fit)
        write_json(context.directory / "summary.json", summary | extra)

    def _train(self, context: StageContext, policy: Model, train: PairBatch, loader: EpochLoader, number: int) -> Params:
        """Trains one member and returns its weights. Members differ in their initial heads and in the order of the pairs."""
        section, model = context.config.preference, policy.with_head("scalar")
        directory = member_directory(context.directory, number)
        hosts.once(lambda: directory.mkdir(exist_ok=True))

        def loop(total_steps: int, checkpoint_every: int, **fields):
            shown = context.title if section.members == 1 else f"{context.title} {number + 1}/{section.members}"
            fields |= {"stage": shown, "directory": directory, "timing": context.directory}
            fields |= {"began": None if number else context.began}
            return loops.loop(context, model, total_steps, checkpoint_every, **fields)

        start = start_from(
            context,
            model,
            weights=lambda: run_models.policy_params(context, policy, self.name),
            trained=lambda weights: self._start(context, policy, weights, number),
        )
        member = Member(start, section, dataclasses.replace(run_settings(context, model), loop=loop), train, loader)
        for _ in member.steps():
            pass
        save_params(directory / "params", member.fit.params)
        return member.fit.weights

    def _start(self, context: StageContext, policy: Model, weights: Params, number: int) -> Params:
        """The policy's trunk, or its adapters, with a random head."""
        key, model = stage_key(context, self.name, streams.member_head(number)), policy.with_head("scalar")
        if model.lora is None:
            return scalar_from_lm(weights, model.init(key))
        return {**run_models.trained_params(context, policy, weights, self.name), "score": model.random_score(key)}


STAGE = Preference()
