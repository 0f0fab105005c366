"""evaluate: samples answers to held-out prompts from every model and compares the models.

Computes gold measures, win rates judged by the labeller, rates by rubrics, KL, lengths and scores, and in the world how many
labels of stage compare are right by the gold judge. Reads the weights of the base and of every stage that trains a policy,
the preference model, and the labels. Writes one row per answer, and summary.json both in the stage's folder and in the work
directory. No other stage may use the gold judge.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign import streams
from jaxalign.algorithms.texts import repeated_share
from jaxalign.config import Config, rounds
from jaxalign.data.chat import styles
from jaxalign.data.sources.generated import world_of
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.data.world import gold
from jaxalign.data.world.label_scores import label_quality
from jaxalign.feedback.labeller import Pair
from jaxalign.feedback.rubrics import builtin_rubrics, kinds_of, load_rubrics
from jaxalign.models.model import Model
from jaxalign.parallel import hosts
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.reasons import gold_labels_sentence, verdict_warning
from jaxalign.records import Prompt, Rollout
from jaxalign.registry.core import names_in
from jaxalign.registry.data_sources import data_source
from jaxalign.registry.stages import STAGES, Batch, policy_makers
from jaxalign.rewards.base import RewardBatch, RewardInputs, columns_of
from jaxalign.rewards.scorer import raw_rollout_scores, scoring_work
from jaxalign.rewards.verifiers import VERIFIERS
from jaxalign.rl.responses import response_mask, response_stats
from jaxalign.rollout.sampler import Engine, TokenSampler, make_sampler, sample_rollout
from jaxalign.rollout.sampling import Sampling
from jaxalign.stages.shared import engines, harness, judges, likelihoods, paired, reads, rubrics, run_models, sources
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.stages.shared.breakdown import Contest, breakdown, means_by_model
from jaxalign.stages.shared.builtin import BuiltinStage
from jaxalign.stages.shared.labelled import row_comparison
from jaxalign.stages.shared.rewards import load_scorer, make_callable
from jaxalign.stages.shared.shards import Queue, Shards, chunks, prompt_row, queues
from jaxalign.steps import work
from jaxalign.storage import json_bytes, json_lines, write_bytes_atomically
from jaxalign.tracking import requests
from jaxalign.tracking.progress import Progress
from jaxalign.tracking.ratings.measures import VERDICTS
from jaxalign.tracking.workdir import read_object
from jaxalign.trainers.evaluation import contests, rate


def evaluated(config: Config) -> tuple[str, ...]:
    """The models to compare, in training order. The last policy of a later round has the name of its folder, "round-2/ppo"."""
    return ("base", *policy_makers(config.stages), *rounds.later_policies(config))


@STAGES.declare(
    "evaluate", samples=True, uses_sampler=True, learns_from=("prompts", "judgements"), windows=True,
    batches=(Batch("evaluate.batch"),),
    programs="jaxalign.planner.stage_programs:evaluate",
    report="jaxalign.tracking.report.evaluation:evaluation",
)
class EvaluateStage(BuiltinStage):
    name = "evaluate"
    published = ("summary.json",)
    config_fields = (
        *reads.MODEL_FIELDS, *reads.LABEL_FIELDS, "judge.evaluate", "stages", "data", "world", "arithmetic", "evaluate",
        "preference.max_length", "reward.source", "reward.verifier", "reward.callable", "sampler",
    )

    def files(self, config: Config) -> dict[Path, str]:
        """Those of every stage, those that are measured on, and the file of rubrics, which is read to detect mistakes before
        any stage starts."""
        named = {"evaluate.texts": config.evaluate.texts, "evaluate.choices": config.evaluate.choices}
        paths = super().files(config) | harness.task_files(config)
        paths |= {Path(path).expanduser(): field for field, path in named.items() if path}
        name = config.evaluate.rubrics
        if name:
            load_rubrics(name)
            paths |= {} if name in builtin_rubrics() else {Path(name).expanduser(): "evaluate.rubrics"}
        return paths

    def inputs(self, config: Config) -> tuple[str, ...]:
        reward_stages = ("preference",) if "preference" in config.stages else ()
        labels = ("compare",) if "compare" in config.stages and data_source(config).gold else ()
        return (*reads.base_stages(config), *evaluated(config)[1:], *reward_stages, *labels)

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.evaluate
        tokenizer = run_models.load_tokenizer(context)
        model = run_models.make_model(config, tokenizer.vocab_size)
        measures = likelihoods.LikelihoodMeasures(config, tokenizer)
        sets = sources.prompt_sets(context, tokenizer)
        prompts = sources.prompts(context, tokenizer, "evaluate", section.prompts, section.max_new_tokens, sets)
        shards, names = Shards(context.directory), evaluated(config)
        # Raises an error before any answer is sampled if the rubrics name no value of the prompts' column.
        kinds = kinds_of(prompts, section.rubric_column, load_rubrics(section.rubrics)) if section.rubrics else {}
        _answer(context, model, tokenizer, prompts, shards, names)
        measured = harness.run_harness(context, model, tokenizer, names)
        rows, compared = list(shards.read()), []
        summary = summarise(config, rows, names)
        paired.merge(summary, measures.summary(context, model, names))
        if section.win_rate_prompts and judges.compares(config):
            compared = compare(context, model, rows, names, prompts[: section.win_rate_prompts])
            summary["win_rates"] = paired.win_rates(compared)
            _warn(context.title, summary["win_rates"])
            lines = json_lines(row for contest in compared for row in contest.rows())
            hosts.once(lambda: write_bytes_atomically(context.directory / VERDICTS, lines))
        if section.rubrics:
            rated = rubrics.rate_answers(context, model, rows, kinds)
            summary["rubrics"] = rubrics.summarise_ratings(rated, load_rubrics(section.rubrics), names, section.rubric_margin)
        if "compare" in config.stages and data_source(config).gold:
            labelled = (row_comparison(row) for row in Shards(context.input_directory("compare")).read())
            summary["labels"] = label_quality(world_of(config), labelled)
            print(f"[{self.name}] {gold_labels_sentence(summary['labels'])}", flush=True)
        columns = breakdown(rows, names, compared) if config.data.eval else {}
        summary |= ({"by_column": columns} if columns else {}) | ({"lm_eval": measured} if measured else {})
        write_json(context.directory / "summary.json", summary | sources.data_summary(sets))

    def publish(self, config: Config, workdir: Path) -> None:
        """Copies the summary without the counts of requests, which depend on the stored answers."""
        summary = read_object(workdir / self.name / "summary.json")
        (name,) = self.published
        write_bytes_atomically(workdir / name, json_bytes({k: v for k, v in summary.items() if k != requests.FIELD}))


def _answer(
    context: StageContext, model: Model, tokenizer: Tokenizer, prompts: Sequence[Prompt], shards: Shards, names: Sequence[str]
) -> None:
    """Writes the missing answers of every model. Their weights are freed on return, before a judge is loaded."""
    config, section = context.config, context.config.evaluate
    each = len(chunks(len(prompts), section.batch))
    left = shards.unfinished([q for m in range(len(names)) for q in queues(len(prompts), section.batch, m * each)])
    total = len(names) * len(prompts)
    with Progress("evaluate", total, total - sum(len(queue.rows) for queue in left), unit="answer") as progress:
        sampling = engines.sampling(section, tokenizer, config.data.style)
        engine = Engine(model, section.batch, config.model.max_length)
        answering, sampler = None, make_sampler(config.sampler, engine, "config.sampler")
        for queue in left:
            name = names[min(queue.chunks) // each]
            if answering is None or answering.name != name:
                answering = Answering(context, engine, name, tokenizer, sampler, sampling)
            for chunk, rows in answering.rows(prompts, queue, progress):
                shards.write(chunk, rows)
            progress.update(len(queue.rows))


@functools.partial(MeshProgram, static_argnames=("model", "temperature"))
def sequence_kl(model: Model, params, rollout: Rollout, temperature: float):
    """float32 [B]: the log-prob of each response under the sampler minus its log-prob under `params`, nats per response."""
    mask = response_mask(rollout)
    reference = response_stats(model, params, rollout, temperature).logprobs
    return ((rollout.logprobs - reference) * mask).sum(axis=1)


class Answering:
    """Samples one model's answers to prompts and measures each: its gold verdict, its KL to the supervised model (sft, or the
    base if sft does not run) and, if preference runs, its raw score."""

    def __init__(
        self, context: StageContext, engine: Engine, name: str, tokenizer: Tokenizer, sampler: TokenSampler, sampling: Sampling
    ):
        model = engine.model
        self.context, self.model, self.name, self.tokenizer = context, model, name, tokenizer
        config = context.config
        self.params = run_models.stage_params(context, name, model)
        self.reference = run_models.policy_params(context, model, "preference")
        self.scorer = load_scorer(context, "preference", model) if "preference" in config.stages else None
        self.sampler, self.padding, self.sampling, self.batch = sampler, engine.padding, sampling, config.evaluate.batch
        sampler.update(self.params, evaluated(config).index(name))
        self.world = world_of(config) if data_source(config).gold else None
        self.timing = engines.timing(context, model)
        parts = names_in(config.reward.source)
        inputs = RewardInputs(config, tokenizer, model, context)
        self.reward = make_callable(inputs) if "callable" in parts and "ppo" in config.stages else None

    def rows(self, prompts: Sequence[Prompt], queue: Queue, progress: Progress) -> Iterator[tuple[int, list[dict]]]:
        """Answers the queue's rows of `prompts`; yields (chunk number, rows) for each of its chunks."""
        config, asked = self.context.config, queue.rows
        ids = [styles.encode_prompt(self.tokenizer, prompts[i].messages, config.data.style) for i in asked]
        # All models share one key, so that answers differ only because the models do.
        key = self.context.key("evaluate", streams.SAMPLES)
        with self.timing.phase("generate") as phase:
            rollout = sample_rollout(
                self.sampler, self.padding, ids, key, asked, self.sampling, engines.counting(progress), versions=False
            )
            phase.tokens, phase.flops = work.sampled(self.model, rollout)
        for number, own in queue.chunks.items():
            part = rollout.part(own.start - asked.start, self.batch)
            yield number, self._rows([prompts[i] for i in own], part)

    def _rows(self, prompts: Sequence[Prompt], rollout: Rollout) -> list[dict]:
        with self.timing.phase("score") as phase:
            phase.tokens, phase.flops = work.logprobs(self.model, rollout)
            if self.scorer is not None:
                phase.flops += scoring_work(self.scorer[0], rollout)[1]
            placed = place_rows(self.model.sharding, rollout)
            # Greedy decoding defines no temperature of the log-probabilities; 1 is used.
            kl = fetch(sequence_kl(self.model, self.reference, placed, self.sampling.temperature or 1.0))
            scores = [None] * self.batch if self.scorer is None else fetch(raw_rollout_scores(*self.scorer, placed)).tolist()
        answers, out = styles.answers_of(self.tokenizer, rollout, self.context.config.data.style), []
        judged, rewards = self._judged(prompts, [text for text, _ in answers[: len(prompts)]]), self._rewards(prompts, rollout)
        for i, prompt in enumerate(prompts):
            (text, ended), count = answers[i], int(rollout.response_length[i])
            out.append(
                {"model": self.name} | prompt_row(prompt) | judged[i]
                | {"response": text, "complete": ended, "tokens": count, "kl": float(kl[i]), "score": scores[i],
                   "repetition": repeated_share(text.split())}
                | rewards[i]
            )
        return out

    def _rewards(self, prompts: Sequence[Prompt], rollout: Rollout) -> list[dict]:
        """{"reward": the score by `config.reward.callable`, summed over tokens, or None if it has none} of each answer; {}
        without a callable."""
        if self.reward is None:
            return [{}] * len(prompts)
        scored = self.reward.score(RewardBatch(rollout, prompts, 0, self.tokenizer))
        totals = scored.scores if scored.scores.ndim == 1 else scored.scores.sum(axis=1)
        return [{"reward": float(total) if kept else None} for total, kept in zip(totals, scored.kept, strict=True)]

    def _judged(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[dict]:
        """The rule-based verdict on each answer: the gold judge's in the world; "correct" for data with reference answers, if
        the verifier rewards them."""
        if self.world is not None:
            verdicts = [dataclasses.asdict(gold.judge(self.world, p, text)) for p, text in zip(prompts, texts, strict=True)]
            return [{"kind": v.pop("kind"), "gold": {name: v[name] for name in gold.MEASURES}} for v in verdicts]
        config = self.context.config
        if not data_source(config).answers or "verifier" not in names_in(config.reward.source):
            return [{"kind": None, "gold": None}] * len(prompts)
        verify = VERIFIERS[config.reward.verifier]
        scores = verify([p.messages for p in prompts], texts, **columns_of(prompts))
        return [{"kind": None, "gold": {"correct": score == 1.0}} for score in scores]


def summarise(config: Config, rows: list[dict], names: Sequence[str]) -> dict:
    """For each model: rates with their counts and 95% Wilson intervals, the mean KL, length and score, and the
    differences from the first model on the same prompts."""
    by_model = {name: [row for row in rows if row["model"] == name] for name in names}
    first = by_model[names[0]]
    # A measure of the gold judge covers only prompts of some kinds.
    kinds = {name: gold.MEASURES[name][0] if name in gold.MEASURES else None for name in first[0]["gold"] or ()}
    summary = {
        "seed": config.seed,
        "prompts": dict(sorted(collections.Counter(row["kind"] or row["source"] for row in first).items())),
        "models": list(names),
        "rates": {},
        "win_rates": [],
    }
    for name in names:
        for measure, covered in kinds.items():
            asked = [row for row in by_model[name] if covered is None or row["kind"] in covered]
            summary["rates"].setdefault(name, {})[measure] = rate([row["gold"][measure] for row in asked])

    means = {field: means_by_model(by_model, field) for field in ("kl", "tokens", "complete")}
    scores = {} if first[0]["score"] is None else means_by_model(by_model, "score")
    summary |= {"kl": means["kl"], "length": means["tokens"], "preference_score": scores}
    if "reward" in first[0]:
        scored = {name: [row for row in rows if row["reward"] is not None] for name, rows in by_model.items()}
        summary["reward"] = means_by_model({name: rows for name, rows in scored.items() if rows}, "reward")
    differences = {"paired": paired.paired_differences(rows, names, kinds)}
    return summary | {"complete": means["complete"]} | paired.word_measures(rows, names) | differences


def compare(
    context: StageContext, model: Model, rows: Sequence[dict], names: Sequence[str], asked: Sequence[Prompt]
) -> list[Contest]:
    """The labeller's preferences between a later model's and an earlier model's answers to the prompts `asked`.

    The labeller asks the judge of config.judge.evaluate or config.feedback in both orders; labels are never inverted. A tie or
    an undecided pair counts one half.
    """
    section, prompts = context.config.evaluate, {prompt.id: prompt for prompt in asked}
    answers = {(row["model"], row["prompt_id"]): row["response"] for row in rows}
    pairings, out = contests(names), []
    with Progress("evaluate", len(pairings) * len(prompts), unit="comparison") as progress:
        meter = engines.Meter(engines.timing(context, model), model, progress)
        labelling = judges.make_labeller(context, judges.make_judge(context, "evaluate", model, section.batch, meter))
        for number, (later, earlier) in enumerate(pairings):
            pairs = [Pair(prompts[i], answers[later, i], answers[earlier, i]) for i in prompts]
            key = context.key("evaluate", streams.KEYS["evaluate"]["labels"] + number)
            with meter.phase("win rates"):
                labelled = labelling.label(pairs, key, 0)
            out.append(Contest(later, earlier, labelled))
            progress.update(len(pairs))
    return out


def _warn(title: str, win_rates: Sequence[Mapping[str, Any]]) -> None:
    """Warns of each two models on most of whose answers the judge gave no verdict."""
    for row in win_rates:
        if warning := verdict_warning(row, f"{row['model']} and {row['against']}"):
            print(f"[{title}] warning: {warning}", flush=True)
