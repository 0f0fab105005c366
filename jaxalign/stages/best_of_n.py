"""best_of_n: samples several answers to each prompt and fine-tunes the policy on those that the preference model scores best.

Reads its starting weights and the preference model. Writes one row per prompt with the chosen answer and every score, then
checkpoints, params and metrics of the fine-tuning, and a summary. With `threshold` it is rejection sampling: prompts whose
best answer scores below the threshold are dropped. Sources: Stiennon et al. 2020 (arXiv 2009.01325); RAFT, arXiv 2304.06767.
"""

from __future__ import annotations

import numpy as np

from jaxalign import streams
from jaxalign.algorithms.best_of_n import analytic_kl, expected_best_of, rejection_sample
from jaxalign.config import BestOfNConfig, Config
from jaxalign.data.loader import EpochLoader
from jaxalign.data.sources.base import PromptSets
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.reasons import MOSTLY, too_few
from jaxalign.records import Prompt, Rollout
from jaxalign.registry.stages import STAGES, Batch
from jaxalign.rewards.scorer import raw_rollout_scores, scoring_work
from jaxalign.stages.shared import engines, reads, run_models, sources
from jaxalign.stages.shared.answering import answers_in, sampled_answers
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.builtin import BuiltinStage
from jaxalign.stages.shared.rewards import load_scorer
from jaxalign.stages.shared.shards import Shards, prompt_row, row_prompt
from jaxalign.stages.shared.training import policy_inputs, train_supervised
from jaxalign.trainers.sft import packed


@STAGES.declare(
    "best_of_n", makes_policy=True, samples=True, uses_sampler=True, trains=True, learns_from=("comparisons",), windows=True,
    batches=(Batch("best_of_n.batch", ("best_of_n.n",)), Batch("best_of_n.batch_rows", ("best_of_n.micro_batches",))),
    programs="jaxalign.planner.stage_programs:best_of_n",
    report="jaxalign.tracking.report.training:losses",
)
class BestOfNStage(BuiltinStage):
    name = "best_of_n"
    config_fields = (*reads.MODEL_FIELDS, "data", "world", "best_of_n", "sampler")

    def inputs(self, config: Config) -> tuple[str, ...]:
        return (*reads.policy_stages(config, self.name), "preference")

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.best_of_n
        tokenizer = run_models.load_tokenizer(context)
        model = run_models.make_model(config, tokenizer.vocab_size)
        shards, sets = Shards(context.directory), sources.prompt_sets(context, tokenizer)
        _choose(context, model, tokenizer, sets, shards)
        rows = list(shards.read())
        chosen = [row for row in rows if row["response"] is not None]
        _check_share(context, len(rows), len(chosen))
        answers = ((row_prompt(row).messages, row["response"]) for row in chosen)
        packed_rows, cut = packed(tokenizer, answers, config.data.style, section.row_length)
        if cut:
            print(f"[{context.title}] warning: {cut:,} of {len(chosen):,} chosen answers, with their prompts, are cut to "
                  f"best_of_n.row_length ({section.row_length} tokens); raise it", flush=True)
        steps = EpochLoader(len(packed_rows.tokens), section.batch_rows, config.seed).steps(section.epochs)
        counts = {"chosen": len(chosen), "chosen_share": len(chosen) / len(rows), "next_turn": _count_cut(context, chosen)}
        extra = summarise(rows, section.n) | counts | {"cut": cut} | sources.data_summary(sets)
        train_supervised(context, section, policy_inputs(context, model, shared=False), packed_rows, None, steps, lambda: extra)


def _check_share(context: StageContext, total: int, chosen: int) -> None:
    """Warns if less than half of the prompts have a chosen answer, and raises UserError if too few have one."""
    section = context.config.best_of_n
    scoring = f" that scores at least {section.threshold}" if section.threshold is not None else ""
    remedy = "lower best_of_n.threshold, or raise best_of_n.max_new_tokens"
    if not chosen:
        raise UserError(f"none of the {total} prompts has a complete answer{scoring}; {remedy}")
    few = too_few(total, chosen, "best_of_n.required_share", section.required_share)
    if few:
        raise UserError(f"{few}, since the other prompts have no complete answer{scoring}; {remedy}")
    if chosen < MOSTLY * total:
        print(f"[{context.title}] warning: only {chosen:,} of {total:,} prompts have a complete answer{scoring}; {remedy}",
              flush=True)


def _count_cut(context: StageContext, chosen: list[dict]) -> int:
    """The number of chosen answers that were cut where another turn begins, which is printed if there are any."""
    count = sum("next_turn" in row.get("notes", ()) for row in chosen)
    if count:
        print(f"[{context.title}] {count:,} of {len(chosen):,} chosen answers were cut at the next turn", flush=True)
    return count


def _choose(context: StageContext, model: Model, tokenizer: Tokenizer, sets: PromptSets, shards: Shards) -> None:
    """Samples n answers to every prompt and writes the best one, chunk by chunk."""
    section, timing, scoring = context.config.best_of_n, engines.timing(context, model), None
    key = context.key("best_of_n", streams.SAMPLES)
    sampled = sampled_answers(context, "best_of_n", model, tokenizer, sets, shards, section.n, key, timing)
    for queue, prompts, rollout in sampled:
        scorer, preference = scoring = scoring or load_scorer(context, "preference", model)
        for number, own in queue.chunks.items():
            begin = own.start - queue.rows.start
            part = rollout.part(begin * section.n, section.batch)
            with timing.phase("score") as phase:
                phase.tokens, phase.flops = scoring_work(scorer, part)
                scores = fetch(raw_rollout_scores(scorer, preference, place_rows(model.sharding, part)))
            asked = prompts[begin : begin + len(own)]
            shards.write(number, _rows(asked, part, scores, section, tokenizer, context.config.data.style))


def _rows(
    prompts: list[Prompt], rollout: Rollout, scores: np.ndarray, section: BestOfNConfig, tokenizer: Tokenizer, style: str
) -> list[dict]:
    """One row per prompt: all n scores and the chosen answer, which is None if no complete answer reaches the threshold.

    An answer ends where the sampled text begins another turn, and has no thoughts, as in the stages compare and evaluate; an
    answer without words before that turn is not chosen. A score is that of the whole sampled text, as in RL and evaluate.
    """
    n, answers = section.n, answers_in(tokenizer, rollout, style)[: len(prompts) * section.n]
    limit = -np.inf if section.threshold is None else section.threshold
    allowed = np.asarray([answer.ended and not answer.emptied for answer in answers])
    taken = np.asarray(rejection_sample(scores[: len(answers)], n, max(limit, np.finfo(np.float32).min), 1, allowed))
    out = []
    for i, prompt in enumerate(prompts):
        mine = range(i * n, (i + 1) * n)
        best = next((row for row in mine if taken[row]), None)
        chosen = {"response": None, "score": None}
        if best is not None:
            chosen = {"response": answers[best].text, "score": float(scores[best])}
            chosen |= {"notes": ["next_turn"]} if answers[best].cut else {}
        out.append(prompt_row(prompt) | chosen | {"scores": [float(scores[row]) for row in mine]})
    return out


def summarise(rows: list[dict], n: int) -> dict:
    """The analytic KL, and for every k up to n the expected score of the best of k (unbiased: averaged over all subsets), over
    the prompts that have k finite scores; None if there are none."""
    scores = np.asarray([row["scores"] for row in rows], np.float32)
    finite = np.isfinite(scores).sum(axis=1)

    def expected(k: int) -> float | None:
        own = scores[finite >= k]
        return float(np.mean(np.asarray(expected_best_of(own, k)))) if len(own) else None

    return {
        "prompts": len(rows),
        "n": n,
        "analytic_kl": float(analytic_kl(n)),
        "expected_best": [expected(k) for k in range(1, n + 1)],
    }
