"""compare: samples answers to each prompt from the supervised policy and labels two of them with the feedback model.

Reads the base (the feedback model, unless config.judge.compare or config.feedback.judge selects another) and sft. Writes one
row per pair.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxalign import streams
from jaxalign.config import Config
from jaxalign.errors import UserError
from jaxalign.feedback.critique import answer, count_outcomes
from jaxalign.feedback.decisions import Calibration, calibrate, decide, is_tie
from jaxalign.feedback.labeller import Pair, choose_pair, incomplete_sides
from jaxalign.feedback.text_generator import TextGenerator
from jaxalign.parallel import hosts
from jaxalign.reasons import (
    COMPARISON,
    advice,
    label_warnings,
    listed,
    missing_verdicts_sentence,
    pairs_sentence,
    self_agreement_sentence,
)
from jaxalign.records import Comparison, PrincipleLabel, Prompt
from jaxalign.registry.judges import stage_judge
from jaxalign.registry.stages import STAGES, Batch
from jaxalign.rollout.sampling import Sampling
from jaxalign.stages.shared import engines, judges, reads, run_models, sources
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.stages.shared.breakdown import prompt_shares
from jaxalign.stages.shared.builtin import BuiltinStage
from jaxalign.stages.shared.labelled import comparison_row, row_comparison
from jaxalign.stages.shared.shards import Queue, Shards, queues
from jaxalign.tracking.progress import Progress

FEWEST_ASKED = 64
"""The stage stops if none of the first pairs, at least this many, has a verdict."""
_CLOSE = 1e-3
"""A probability closer to 0.5 prefers neither answer."""


@STAGES.declare(
    "compare", samples=True, learns_from=("prompts",), windows=True, makes=("comparisons",), asks_judge=("compare",),
    batches=(Batch("compare.batch"),),
    programs="jaxalign.planner.stage_programs:compare",
    report="jaxalign.tracking.report.feedback:labels", preview="jaxalign.stages.shared.preview:compare_rows",
)
class CompareStage(BuiltinStage):
    name = "compare"
    config_fields = (
        *reads.MODEL_FIELDS, *reads.PROMPT_FIELDS, *reads.LABEL_FIELDS, "feedback.invert", "judge.compare", "compare",
        "feedback.correct_position", "feedback.max_chance_share",
    )

    def inputs(self, config: Config) -> tuple[str, ...]:
        judge = judges.judge_stages(config, self.name)
        return tuple(dict.fromkeys((*reads.base_stages(config), *reads.policy_stages(config, self.name), *judge)))

    def run(self, context: StageContext) -> None:
        config = context.config
        tokenizer = run_models.load_tokenizer(context)
        sets = sources.prompt_sets(context, tokenizer)
        prompts = sources.stage_prompts(context, tokenizer, self.name, "compare", sets)
        shares = prompt_shares(context, [prompt.source for prompt in prompts])
        shards = Shards(context.directory)
        every = queues(len(prompts), config.compare.batch)
        left = shards.unfinished(every)
        if left:
            _label(context, prompts, shards, left)
        calibration = _decide(config, shards, every)
        summary = summarise(list(shards.read()), calibration)
        for sentence in (pairs_sentence(summary), missing_verdicts_sentence(summary), self_agreement_sentence(summary)):
            if sentence is not None:
                print(f"[{context.title}] {sentence}", flush=True)
        for warning in label_warnings(summary, config.compare.max_new_tokens):
            print(f"[{context.title}] warning: {warning}", flush=True)
        write_json(context.directory / "summary.json", summary | shares | sources.data_summary(sets))


def _label(context: StageContext, prompts: Sequence[Prompt], shards: Shards, left: Sequence[Queue]) -> None:
    """Samples and labels the pairs of unfinished queues, and writes their rows."""
    config, section = context.config, context.config.compare
    tokenizer = run_models.load_tokenizer(context)
    model = run_models.make_model(config, tokenizer.vocab_size)
    sampling = engines.sampling(section, tokenizer, config.data.style)
    key = context.key("compare", "labels")
    start = len(prompts) - sum(len(queue.rows) for queue in left)
    asked: collections.deque[tuple[Queue, Callable[[], list[Comparison]]]] = collections.deque()
    written = (row_comparison(row) for row in shards.read())
    problems = collections.Counter(pair.problem for pair in written if pair.response_a != pair.response_b)
    with Progress(context.title, len(prompts), start, unit="pair") as progress, _asking(config) as asker:
        meter = engines.Meter(engines.timing(context, model), model, progress)
        params = run_models.policy_params(context, model, "compare")
        policy = engines.text_generator(context, model, params, section.batch, meter)
        labelling = judges.make_labeller(context, judges.make_judge(context, "compare", model, section.batch, meter))

        def write(ahead: int) -> None:
            """Writes the rows of all queues but the last `ahead` ones."""
            while len(asked) > ahead:
                queue, result = asked.popleft()
                with meter.phase("label"):
                    labelled = result()
                problems.update(pair.problem for pair in labelled if pair.response_a != pair.response_b)
                _check_verdicts(problems)  # Before they are written: a run that goes on asks them again.
                shards.write_all(queue, [comparison_row(comparison) for comparison in labelled])
                progress.update(len(queue.rows))

        for queue in left:
            rows = queue.rows
            own = [prompts[i] for i in rows]
            with meter.phase("generate"):
                pairs = _pairs(context, policy, own, sampling, rows.start)
            call = functools.partial(labelling.label, pairs, key, rows.start, config.feedback.invert)
            with meter.phase("label"):
                asked.append((queue, asker.begin(call)))
            write(asker.ahead)
        write(0)


def _check_verdicts(problems: Mapping[str | None, int]) -> None:
    """Raises UserError if at least `FEWEST_ASKED` pairs were asked and none has a verdict, so that the stage does not go on
    with a judge that cannot be used. problems: the number of asked pairs by problem; None: the pairs with a verdict."""
    asked = sum(problems.values())
    if asked >= FEWEST_ASKED and None not in problems:
        raise UserError(f"the judge gave no verdict on any of the first {asked} pairs: {listed(problems, COMPARISON)}; "
                        f"{advice(problems, COMPARISON)}")


def _pairs(
    context: StageContext, policy: TextGenerator, prompts: Sequence[Prompt], sampling: Sampling, first_row: int
) -> list[Pair]:
    """The pair of answers to each prompt that is compared, of `compare.samples` answers, which have neighbouring global rows.

    If one of the two is missing, both are "", since equal answers are not compared.
    """
    config, each, pairs = context.config, context.config.compare.samples, []
    repeated = [prompt for prompt in prompts for _ in range(each)]
    key = context.key("compare", streams.SAMPLES)
    sampled = answer(policy, repeated, key, sampling, each * first_row, config.data.style)
    for number, prompt in enumerate(prompts):
        answers = sampled[each * number : each * (number + 1)]
        chosen = choose_pair(answers, config.compare.choose)
        if chosen is None:
            pairs.append(Pair(prompt, "", "", missing=True))
        else:
            first, second = (answers[i] for i in chosen)
            incomplete = incomplete_sides(first.complete, second.complete)
            pairs.append(Pair(prompt, first.text, second.text, incomplete=incomplete))
    return pairs


def _decide(config: Config, shards: Shards, queues: Sequence[Queue]) -> Calibration:
    """Decides all labels again, with the position bias and the margin that the verdicts of all pairs give.

    Verdicts stay in the rows, so an interrupted stage repeats this step with the same result.
    """
    rows = list(shards.read())
    comparisons = [row_comparison(row) for row in rows]
    calibration = calibrate([label for pair in comparisons for label in pair.labels], config.feedback)
    settings = (calibration, config.feedback, config.feedback.invert)
    decided = [comparison_row(decide(pair, *settings)) if pair.labels else row
               for pair, row in zip(comparisons, rows, strict=True)]
    for chunk, own in (item for queue in queues for item in queue.chunks.items()):
        if json.dumps(decided[own.start : own.stop]) != json.dumps(rows[own.start : own.stop]):
            shards.write(chunk, decided[own.start : own.stop])
    return calibration


class Asker(NamedTuple):
    """Calls a judge. begin: starts a call, and returns a function that waits for its result. ahead: the number of calls that
    may be in progress while the policy samples."""

    begin: Callable[[Callable[[], Any]], Callable[[], Any]]
    ahead: int


@contextlib.contextmanager
def _asking(config: Config) -> Iterator[Asker]:
    """Asks a judge outside of this process while the policy samples the next rows.

    A call runs in a thread if the judge does not compute on the run's devices and the run has one process: several processes
    exchange the judge's results in the order of their calls. Otherwise a call ends before `begin` returns.
    """
    if stage_judge(config, "compare").on_all_processes or hosts.count() > 1:

        def now(call: Callable[[], Any]) -> Callable[[], Any]:
            result = call()
            return lambda: result

        yield Asker(now, 0)
        return
    with ThreadPoolExecutor(1, "judge") as pool:
        try:
            yield Asker(lambda call: pool.submit(call).result, 1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def summarise(rows: Sequence[Mapping[str, Any]], calibration: Calibration) -> dict[str, Any]:
    """The summary of stage compare's rows. Shares are None if nothing was asked."""
    pairs = [row_comparison(row) for row in rows]
    asked = [pair for pair in pairs if pair.response_a != pair.response_b]
    labels = [label for pair in asked for label in pair.labels]
    both = [pair for pair in asked if pair.label_ab is not None and pair.label_ba is not None]
    confidence = [abs((pair.label_ab + pair.label_ba) / 2 - 0.5) + 0.5 for pair in both]
    counts, edges = np.histogram(confidence, bins=10, range=(0.5, 1.0))
    apart = [pair.disagreement for pair in pairs if pair.disagreement is not None]
    outside = [pair.outside for pair in pairs if pair.outside is not None]
    return {
        "pairs": len(rows),
        "identical_pairs": len(rows) - len(asked),
        "incomplete": sum(len(pair.incomplete) for pair in asked),
        "undecided": sum(not pair.decided for pair in asked),
        "unparsable": sum(pair.problem is not None for pair in asked),
        "outcomes": count_outcomes(row.get("outcome") for row in rows),
        "requests": sum(1 + (label.ba is not None or label.problem_ba is not None) for label in labels),
        "problems": count_outcomes(problem for label in labels for problem in (label.problem_ab, label.problem_ba)),
        "decided_share": sum(pair.decided for pair in asked) / max(1, len(rows)),
        "outside_mass": _mean(outside),
        **({"disagreement": _mean(apart)} if apart else {}),
        **_self_agreement(labels),
        "confidence_histogram": {"edges": [float(x) for x in edges], "counts": [int(x) for x in counts]},
        "calibration": dataclasses.asdict(calibration) | {"position": dict(calibration.position)},
        "principles": {name: _principle(name, asked) for name in sorted({label.principle for label in labels})},
    }


def _principle(name: str, asked: Sequence[Comparison]) -> dict[str, Any]:
    """The part of one principle: for how many pairs it has all verdicts that were asked for, how it answered, and how many
    labels it decided."""
    labels = [label for pair in asked for label in pair.labels if label.principle == name]
    return {
        "pairs": sum(label.complete for label in labels),
        "decides": sum(pair.principle == name for pair in asked),
        "mean_confidence": _mean([abs((x.ab + x.ba) / 2 - 0.5) + 0.5 for x in labels if x.ab is not None and x.ba is not None]),
        **_self_agreement(labels),
    }


def _self_agreement(labels: Sequence[PrincipleLabel]) -> dict[str, Any]:
    """ties: the share of labels that are ties. position_bias: the mean P(the answer shown first is better) - 0.5.
    order_agreement: the share of labels with the same verdict in both orders: response_a, response_b, or neither."""
    both = [label for label in labels if label.ab is not None and label.ba is not None]
    sides = [[0 if abs(p - 0.5) < _CLOSE else 1 if p > 0.5 else -1 for p in (label.ab, label.ba)] for label in both]
    known = [label for label in labels if label.tie is not None]
    return {
        "ties": _mean([is_tie(label) for label in known]),
        "position_bias": _mean([(label.ab + 1 - label.ba) / 2 - 0.5 for label in both]),
        "order_agreement": _mean([first == second for first, second in sides]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
