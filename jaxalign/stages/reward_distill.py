"""reward_distill: trains a smaller reward model, the student, to predict the scores of the preference model, its teacher.

Reads the weights that RL starts from, the preference model, and the labelled pairs (compare or the preference file). Writes
one row per prompt with its fresh answers, checkpoints, params, metrics, speed.json (wall-clock times) and a summary. The
student trains on the fresh answers and on the answers of the teacher's training pairs, without their labels. It is evaluated
on held-out prompts and pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np

from jaxalign import streams
from jaxalign.algorithms.rewards import score_statistics
from jaxalign.algorithms.statistics import pearson, spearman, wilson_interval
from jaxalign.config import Config
from jaxalign.data.loader import EpochLoader
from jaxalign.data.sources.base import PromptSets, split_by_prompt
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.model import Model, Params
from jaxalign.parallel.rows import place_rows
from jaxalign.records import Comparison, PairBatch, Prompt, ScoredPairs
from jaxalign.registry.stages import STAGES, Batch
from jaxalign.rewards.scorer import Scorer, raw_sequence_scores, student_model
from jaxalign.stages.shared import engines, reads, run_models, sources
from jaxalign.stages.shared.answering import SampledAnswer, answers_in, sampled_answers
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.stages.shared.builtin import BuiltinStage
from jaxalign.stages.shared.labelled import labelled_split
from jaxalign.stages.shared.preference_pairs import held_out_parts
from jaxalign.stages.shared.rewards import load_scorer
from jaxalign.stages.shared.shards import Shards, prompt_row, row_prompt
from jaxalign.stages.shared.training import stage_inputs
from jaxalign.steps import work
from jaxalign.steps.checkpoint import save_params
from jaxalign.trainers.preference_quality import accuracy
from jaxalign.trainers.scoring import all_scores, pair_arrays
from jaxalign.trainers.student import Student, first_layers

SPEED = "speed.json"
_WARM_UP, _REPEATS = 3, 21


@STAGES.declare(
    "reward_distill", samples=True, uses_sampler=True, trains=True, learns_from=("comparisons",),
    batches=(
        Batch("reward_distill.batch", ("reward_distill.samples",)),
        Batch("reward_distill.batch_pairs", ("reward_distill.micro_batches",)),
    ),
    programs="jaxalign.planner.stage_programs:reward_distill",
    report="jaxalign.tracking.report.reward_models:distilled",
)
class RewardDistillStage(BuiltinStage):
    name = "reward_distill"
    config_fields = (
        *reads.MODEL_FIELDS,
        *("data", "world", "reward_distill", "preference.max_length", "preference.held_out_share"),
        *("preference.normalise", "preference.early_stopping", "feedback.undecided", "feedback.undecided_weight", "sampler"),
    )

    def inputs(self, config: Config) -> tuple[str, ...]:
        return (*reads.policy_stages(config, self.name), *sources.made_in(config, "compare"), "preference")

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.reward_distill
        tokenizer = run_models.load_tokenizer(context)
        policy = run_models.make_model(config, tokenizer.vocab_size)
        sets = sources.prompt_sets(context, tokenizer)
        _answer(context, policy, tokenizer, sets)
        teacher = load_scorer(context, "preference", policy)
        model = student_model(section, policy)
        fresh, held_out = split_by_prompt(
            fresh_pairs(Shards(context.directory).read()), section.held_out_share, config.seed,
            where="the answers of stage reward_distill", field="config.reward_distill.held_out_share",
        )
        labelled, labelled_held_out, _ = labelled_split(context, tokenizer, config.preference)
        _, labelled_held_out = held_out_parts(context, labelled_held_out)  # The other part chose the teacher's weights.
        unseen = {pair.prompt.messages for pair in held_out}  # With a preference file, its pairs and RL share prompts.
        labelled = [pair for pair in labelled if pair.prompt.messages not in unseen]
        arrays = [
            pair_arrays(tokenizer, pairs, config.data.style, config.preference.max_length)
            for pairs in ([*fresh, *labelled], held_out, labelled_held_out)
        ]
        with engines.timing(context, policy).phase("score") as phase:
            raw = [all_scores(*teacher, pairs, section.batch_pairs) for pairs in arrays]
            phase.tokens = sum(int(pairs.length.sum()) for pairs in arrays)
            phase.flops = teacher[0].members * sum(work.reading_pairs(teacher[0].model, pairs) for pairs in arrays)
        train = ScoredPairs(arrays[0].tokens, arrays[0].length, (raw[0] - teacher[0].shift) / teacher[0].scale)
        params, steps = self._train(context, model, teacher, train)
        student = Scorer(model)
        student_scores = [all_scores(student, params, pairs, section.batch_pairs) for pairs in arrays]
        shift, scale = (float(x) for x in score_statistics(student_scores[0][: len(fresh)].reshape(-1)))
        normalised = {"shift": shift, "scale": scale} if config.preference.normalise else {"shift": 0.0, "scale": 1.0}
        summary = {"steps": steps, "train_pairs": len(train.target), "fresh_pairs": len(fresh)} | normalised
        summary["agreement"] = agreement(raw[1], student_scores[1])
        label = arrays[2].label
        summary["labelled"] = {"teacher": accuracy(raw[2], label), "student": accuracy(student_scores[2], label)}
        summary["parameters"] = {
            name: sum(leaf.size for leaf in jax.tree.leaves(weights))
            for name, weights in (("teacher", teacher[1]), ("student", params))
        }
        write_json(context.directory / SPEED, speed([teacher, (student, params)], arrays[0], section.batch))
        write_json(context.directory / "summary.json", summary | sources.data_summary(sets))

    def _train(self, context: StageContext, model: Model, teacher: tuple[Scorer, Params], train: ScoredPairs):
        """(params, steps) of the student."""
        section = context.config.reward_distill

        def init() -> Params:
            if section.start == "teacher":
                return first_layers(teacher, model)
            return model.init(context.key(self.name, "student"))

        loader = EpochLoader(len(train.target), section.batch_pairs, context.stream_seed, streams.LOADERS[self.name])
        # All parameters are trained, and nothing else reads their initial values.
        use = streams.KEYS[self.name]["state"]
        student = Student(stage_inputs(context, model, weights=init, trained=lambda params: params, use=use), section)
        for _ in student.fit(train, teacher[0].scale, loader):
            pass
        save_params(context.directory / "params", student.params)
        return student.params, loader.steps(section.epochs)


def _answer(context: StageContext, policy: Model, tokenizer: Tokenizer, sets: PromptSets) -> None:
    """Samples `samples` answers to every prompt with the weights that RL starts from, chunk by chunk.

    An answer ends where the sampled text begins another turn, and has no thoughts, as in stage compare.
    """
    n, shards, timing = context.config.reward_distill.samples, Shards(context.directory), engines.timing(context, policy)
    key = context.key("reward_distill", "samples")
    sampled = sampled_answers(context, "reward_distill", policy, tokenizer, sets, shards, n, key, timing)
    for queue, prompts, rollout in sampled:
        answers = answers_in(tokenizer, rollout, context.config.data.style)
        rows = [_row(prompt, answers[i * n : (i + 1) * n]) for i, prompt in enumerate(prompts)]
        shards.write_all(queue, rows)


def _row(prompt: Prompt, answers: Sequence[SampledAnswer]) -> dict:
    """A prompt with its answers, and the positions of those without words before another turn, if any."""
    emptied = [i for i, answer in enumerate(answers) if answer.emptied]
    row = prompt_row(prompt) | {"responses": [answer.text for answer in answers]}
    return row | ({"emptied": emptied} if emptied else {})


def fresh_pairs(rows) -> list[Comparison]:
    """Pairs of consecutive answers to each prompt, without those of an emptied answer. They are unlabelled, so their label is
    0.5. Raises UserError if there are none."""
    pairs, total = [], 0
    for row in rows:
        prompt, said, emptied = row_prompt(row), row["responses"], row.get("emptied", ())
        total += len(said) // 2
        pairs += [Comparison(prompt, said[i], said[i + 1], 0.5) for i in range(0, len(said), 2)
                  if i not in emptied and i + 1 not in emptied]
    if not pairs:
        raise UserError(f"each of the {total:,} pairs of fresh answers has one that is empty before its next turn; start from "
                        "a model that answers the prompts in this data.style")
    return pairs


def agreement(teacher: np.ndarray, student: np.ndarray) -> dict | None:
    """How well the scores [B, 2] of teacher and student agree on the same pairs.

    Returns:
      Among pairs whose teacher scores differ: the share that both models order the same way, with its 95% Wilson interval.
      Also the correlations over all individual answers. None if the teacher's scores are equal in every pair.
    """
    differ = teacher[:, 0] != teacher[:, 1]
    total = int(differ.sum())
    if not total:
        return None
    alike = int(np.sum((np.sign(teacher[:, 0] - teacher[:, 1]) == np.sign(student[:, 0] - student[:, 1]))[differ]))
    low, high = wilson_interval(alike, total)
    agreed = {"pairs": total, "rate": alike / total, "low": low, "high": high}
    x, y = teacher.reshape(-1), student.reshape(-1)
    return agreed | {"pearson": pearson(x, y), "spearman": spearman(x, y)}


def speed(scorers: Sequence[tuple[Scorer, Params]], pairs: PairBatch, rows: int) -> dict:
    """The median seconds that teacher and student take to score the same `rows` sequences, timed alternately after warm-up."""
    width = pairs.tokens.shape[-1]
    index = np.arange(rows) % (2 * len(pairs.label))
    batch = place_rows(scorers[0][0].model.sharding, (pairs.tokens.reshape(-1, width)[index], pairs.length.reshape(-1)[index]))
    batch = jax.block_until_ready(jax.tree.map(jax.numpy.asarray, batch))
    taken: list[list[float]] = [[], []]
    for repeat in range(_WARM_UP + _REPEATS):
        for seconds, (scorer, params) in zip(taken, scorers, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(raw_sequence_scores(scorer, params, *batch))
            if repeat >= _WARM_UP:
                seconds.append(time.perf_counter() - began)
    teacher, student = map(statistics.median, taken)
    device = scorers[0][0].model.sharding.device.device_kind
    measured = {"rows": rows, "width": width, "repeats": _REPEATS, "device": device}
    return measured | {"teacher_seconds": teacher, "student_seconds": student, "speedup": teacher / student}
