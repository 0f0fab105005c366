"""revise: samples answers from the base and has them critiqued and revised under randomly drawn principles.

Reads the base. Writes one row per red-team prompt and round, and one per helpful prompt (round 0).
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from jaxalign import streams
from jaxalign.config import Config
from jaxalign.feedback.constitution import load_constitution
from jaxalign.feedback.critique import answer, answer_and_revise, answer_outcome, count_outcomes, draw_principles
from jaxalign.reasons import advice, too_few
from jaxalign.records import Revision
from jaxalign.registry.stages import STAGES, Batch
from jaxalign.stages.shared import engines, judges, reads, run_models, sources
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.stages.shared.breakdown import prompt_shares
from jaxalign.stages.shared.builtin import BuiltinStage
from jaxalign.stages.shared.labelled import print_report, revision_report, warn_about_few
from jaxalign.stages.shared.shards import Queue, Shards, chunks, prompt_row, queues
from jaxalign.tracking.progress import Progress


@STAGES.declare(
    "revise", samples=True, learns_from=("prompts",), windows=True, makes=("revisions",), asks_judge=("critique", "revise"),
    batches=(Batch("revise.batch"),),
    programs="jaxalign.planner.stage_programs:revise",
    report="jaxalign.tracking.report.feedback:revisions", preview="jaxalign.stages.shared.preview:revise_rows",
)
class ReviseStage(BuiltinStage):
    name = "revise"
    config_fields = (*reads.BASE_FIELDS, *reads.PROMPT_FIELDS, "revise", *reads.JUDGE_FIELDS, "judge.revise")

    def inputs(self, config: Config) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*reads.base_stages(config), *judges.judge_stages(config, self.name))))

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.revise
        constitution = load_constitution(config.feedback.constitution)
        tokenizer = run_models.load_tokenizer(context)
        model = run_models.make_model(config, tokenizer.vocab_size)
        shards, sets = Shards(context.directory), sources.prompt_sets(context, tokenizer)
        red_team, helpful = (
            sources.prompts(context, tokenizer, purpose, count, section.max_new_tokens, sets)
            for purpose, count in (("red_team", section.red_team_prompts), ("helpful", section.helpful_prompts))
        )
        shares = prompt_shares(context, [prompt.source for prompt in (*red_team, *helpful)])
        first = len(chunks(len(red_team), section.batch))  # The first chunk of helpful prompts.
        left = shards.unfinished([*queues(len(red_team), section.batch), *queues(len(helpful), section.batch, first)])
        style, total = config.data.style, len(red_team) + len(helpful)
        sampling = engines.sampling(section, tokenizer, style)
        with Progress(self.name, total, total - sum(len(queue.rows) for queue in left), unit="prompt") as progress:
            if left:
                meter = engines.Meter(engines.timing(context, model), model, progress)
                base = run_models.base_params(context, model)
                policy = engines.text_generator(context, model, base, section.batch, meter)
                judge = judges.make_judge(context, self.name, model, section.batch, meter, sampling, base=base)
            for queue in left:
                rows, prompts = queue.rows, red_team if min(queue.chunks) < first else helpful
                own = [prompts[i] for i in rows]
                with meter.phase("generate"):
                    if prompts is red_team:
                        rules = draw_principles(constitution, rows, section.rounds, config.seed, streams.PRINCIPLES["revise"])
                        key = context.key(self.name, streams.SAMPLES)
                        revisions = answer_and_revise(
                            policy, judge, own, rules, key, sampling, rows.start, style, section.max_growth
                        )
                    else:
                        key = context.key(self.name, "revisions")
                        answers = answer(policy, own, key, sampling, rows.start, style)
                        revisions = []
                        for prompt, said in zip(own, answers, strict=True):  # Without critique and revision.
                            outcome = answer_outcome(said.text, said.complete)
                            revisions.append(Revision(
                                prompt, 0, None, said.text, None, None, said.complete, outcome, said.notes, said.reasoning
                            ))
                _write(shards, queue, revisions)
                if queue is left[0] and len(left) > 1:
                    _warn_early(config, list(shards.read()))
                progress.update(len(rows))
        rows = list(shards.read())
        usable = revision_report(config, rows)
        print_report(self.name, usable)
        warn_about_few(self.name, config.sft, usable.total, usable.usable)
        write_json(
            context.directory / "summary.json",
            _summary(rows, section.rounds) | {"usable": usable.to_dict()} | shares | sources.data_summary(sets),
        )


def _write(shards: Shards, queue: Queue, revisions: Sequence[Revision]) -> None:
    """Writes each chunk's revisions, round by round. `revisions` has those of the whole queue, in the same order."""
    rows = []
    for revision in revisions:
        row = prompt_row(revision.prompt)
        for name in ("round", "principle", "response", "critique", "revision", "complete"):
            row[name] = getattr(revision, name)
        for name in ("outcome", "notes", "reasoning"):  # Written only where there is one.
            if getattr(revision, name):
                row[name] = getattr(revision, name)
        rows.append(row)
    rounds = range(0, len(rows), len(queue.rows))
    for number, indices in queue.chunks.items():
        shards.write(number, [rows[first + index - queue.rows.start] for first in rounds for index in indices])


def _warn_early(config: Config, rows: Sequence[dict]) -> None:
    """Warns after the first queue if stage sft would refuse the rows, so that a long run need not end before one knows."""
    report = revision_report(config, rows)
    few = too_few(report.total, report.usable, "sft.required_share", config.sft.required_share)
    if few and "sft" in config.stages:
        print(f"[revise] warning: {few} so far: {report.sentences()[0]}; stage sft stops if this goes on: "
              f"{advice(report.reasons)}", flush=True)


def _summary(rows: Sequence[dict], rounds: int) -> dict:
    revised = [row for row in rows if row["round"] > 0]
    return {
        "prompts": sum(row["round"] == 1 for row in rows),
        "rounds": rounds,
        "helpful_prompts": sum(row["round"] == 0 for row in rows),
        "principles": dict(sorted(collections.Counter(row["principle"] for row in revised).items())),
        "changed": sum(row["revision"] != row["response"] for row in revised),
        "incomplete": sum(not row["complete"] for row in rows),
        "outcomes": count_outcomes(row.get("outcome") for row in rows),
        "notes": dict(sorted(collections.Counter(note for row in rows for note in row.get("notes", ())).items())),
    }
