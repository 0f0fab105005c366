"""compare: samples two answers to each prompt from the supervised policy and labels the pair with the feedback model.

Reads the base (the feedback model, unless config.judge.compare or config.feedback.judge selects another) and sft. Writes one
row per pair.
"""

from __future__ import annotations

import collections

import numpy as np

from jaxalign import streams
from jaxalign.config import Config
from jaxalign.feedback.critique import Answer, answer
from jaxalign.feedback.labeller import Pair
from jaxalign.feedback.outcomes import count_outcomes
from jaxalign.reasons import contradictory, few_decided, mostly_outside, pairs_sentence
from jaxalign.records import Prompt
from jaxalign.stages.shared import engines, judges, loops, reads, run_models, sources
from jaxalign.stages.shared.base import Stage, StageContext, write_json
from jaxalign.stages.shared.keys import stage_key
from jaxalign.stages.shared.labelled import comparison_row, pair_outcome
from jaxalign.stages.shared.shards import Shards, queues
from jaxalign.tracking.progress import Progress


class Compare(Stage):
    name = "compare"
    config_fields = (
        *reads.MODEL_FIELDS, *reads.PROMPT_FIELDS, *reads.LABEL_FIELDS, "feedback.invert", "judge.compare", "compare",
    )

    def inputs(self, config: Config) -> tuple[str, ...]:
        judge = judges.judge_stages(config, self.name)
        return tuple(dict.fromkeys((*reads.base_stages(config), *reads.policy_stages(config, self.name), *judge)))

    def files(self, config: Config):
        return reads.base_files(config) | sources.data_files(config) | judges.feedback_files(config, self.name)

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.compare
        tokenizer = run_models.load_tokenizer(context)
        model = run_models.make_model(config, tokenizer.vocab_size)
        sets = sources.prompt_sets(context, tokenizer)
        prompts = sources.prompts(context, tokenizer, "compare", section.prompts, section.max_new_tokens, sets)
        sampling = engines.sampling(section, tokenizer, config.data.style)
        shards = Shards(context.directory)
        left = shards.unfinished(queues(len(prompts), section.batch))
        start = len(prompts) - sum(len(queue.rows) for queue in left)
        with Progress(context.title, len(prompts), start, unit="pair") as progress:
            if left:
                meter = loops.Meter(loops.timing(context, model), model, progress)
                params = run_models.policy_params(context, model, self.name)
                policy = engines.speaker(context, model, params, section.batch, meter)
                labelling = judges.make_labeller(context, judges.make_judge(context, self.name, model, section.batch, meter))
            for queue in left:
                rows = queue.rows
                own = [prompts[i] for i in rows]
                with meter.phase("generate"):
                    # Each prompt appears twice in a row, so that its two samples have neighbouring global rows.
                    twice = [prompt for prompt in own for _ in range(2)]
                    key = stage_key(context, self.name, streams.SAMPLES)
                    said = answer(policy, twice, key, sampling, 2 * rows.start, config.data.style)
                pairs = [_pair(p, *said[2 * i : 2 * i + 2]) for i, p in enumerate(own)]
                with meter.phase("label"):
                    key = stage_key(context, self.name, "labels")
                    labelled = labelling.label(pairs, key, rows.start, config.feedback.invert)
                shards.write_all(queue, [comparison_row(comparison) for comparison in labelled])
                progress.update(len(rows))
        summary = summarise(shards)
        print(f"[{context.title}] {pairs_sentence(summary)}", flush=True)
        for warning in filter(None, (few_decided(summary), mostly_outside(summary), contradictory(summary))):
            print(f"[{context.title}] warning: {warning}", flush=True)
        write_json(context.directory / "summary.json", summary | sources.data_summary(sets))


def _pair(prompt: Prompt, first: Answer, second: Answer) -> Pair:
    """The pair of answers. If one is missing, both become "", since equal answers are not compared."""
    if first.sampled and second.sampled:
        return Pair(prompt, first.text, second.text)
    return Pair(prompt, "", "", missing=True)


def summarise(shards: Shards) -> dict:
    """Counts, position bias, agreement between the two orders, and the confidence of the labels."""
    rows = list(shards.read())
    asked = [row for row in rows if row["response_a"] != row["response_b"]]
    parsed = [row for row in asked if row["label_ab"] is not None]
    ab, ba = (np.asarray([row[name] for row in parsed]) for name in ("label_ab", "label_ba"))
    decided = [row for row in parsed if row["decided"]]
    confidence = np.maximum((ab + ba) / 2, 1 - (ab + ba) / 2) if parsed else np.zeros(0)
    apart = [row["disagreement"] for row in rows if row.get("disagreement") is not None]
    outside = [row["outside"] for row in rows if row.get("outside") is not None]
    counts, edges = np.histogram(confidence, bins=10, range=(0.5, 1.0))
    by_principle = collections.defaultdict(list)
    for row, value in zip(parsed, confidence, strict=True):
        for name in row["principles"]:
            by_principle[name].append(float(value))
    return {
        "pairs": len(rows),
        "identical_pairs": sum(row["response_a"] == row["response_b"] for row in rows),
        "undecided": sum(not row["decided"] for row in asked),
        "unparsable": len(asked) - len(parsed),
        "outcomes": count_outcomes(pair_outcome(row) for row in rows),
        "outside_mass": float(np.mean(outside)) if outside else None,
        **({"disagreement": float(np.mean(apart))} if apart else {}),
        # P(first shown) is label_ab in one order and 1 - label_ba in the other.
        "position_bias": float(np.mean((ab + 1 - ba) / 2) - 0.5) if parsed else None,
        "order_agreement": float(np.mean((ab > 0.5) == (ba > 0.5))) if parsed else None,
        "decided_order_agreement": float(np.mean([(row["label_ab"] > 0.5) == (row["label_ba"] > 0.5) for row in decided]))
        if decided else None,
        "confidence_histogram": {"edges": [float(x) for x in edges], "counts": [int(x) for x in counts]},
        "principles": {
            name: {"pairs": len(values), "mean_confidence": float(np.mean(values))}
            for name, values in sorted(by_principle.items())
        },
    }


STAGE = Compare()
