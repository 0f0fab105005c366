"""compare: samples answers to each prompt from the supervised policy and labels two of them with the feedback model.

Reads the base (the feedback model, unless config.judge.compare or config.feedback.judge selects another) and sft. Writes one
row per pair.
"""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Callable, Sequence

from jaxalign import streams
from jaxalign.config import Config
from jaxalign.feedback.critique import answer
from jaxalign.feedback.decisions import Calibration, calibrate, decide
from jaxalign.feedback.labeller import Pair, choose_pair, incomplete_sides
from jaxalign.feedback.text_generator import TextGenerator
from jaxalign.reasons import label_warnings, pairs_sentence, self_agreement_sentence
from jaxalign.records import Comparison, Prompt
from jaxalign.registry.stages import STAGES, Batch
from jaxalign.rollout.sampling import Sampling
from jaxalign.stages.shared import engines, judges, loops, overlap, reads, run_models, sources
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.stages.shared.breakdown import prompt_shares
from jaxalign.stages.shared.builtin import BuiltinStage
from jaxalign.stages.shared.label_summary import summarise
from jaxalign.stages.shared.labelled import comparison_row, row_comparison
from jaxalign.stages.shared.shards import Queue, Shards, queues
from jaxalign.tracking.progress import Progress


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
        print(f"[{context.title}] {pairs_sentence(summary)}", flush=True)
        print(f"[{context.title}] {self_agreement_sentence(summary)}", flush=True)
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
    with Progress(context.title, len(prompts), start, unit="pair") as progress, overlap.asker(config, "compare") as asker:
        meter = loops.Meter(loops.timing(context, model), model, progress)
        params = run_models.policy_params(context, model, "compare")
        policy = engines.text_generator(context, model, params, section.batch, meter)
        labelling = judges.make_labeller(context, judges.make_judge(context, "compare", model, section.batch, meter))

        def write(ahead: int) -> None:
            """Writes the rows of all queues but the last `ahead` ones."""
            while len(asked) > ahead:
                queue, result = asked.popleft()
                with meter.phase("label"):
                    labelled = result()
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
