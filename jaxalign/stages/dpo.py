"""dpo: the policy learns directly from labelled pairs, or by KTO from single judged answers, without a preference model and
without sampling.

Reads the weights it starts from (policy and reference) and compare (world) or the file. Writes checkpoints,
params, metrics, the reference's log-probabilities and a summary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Sequence

import jax
import numpy as np

from jaxalign import streams
from jaxalign.algorithms.statistics import wilson_interval
from jaxalign.config import Config, Dpo
from jaxalign.data.chat import styles
from jaxalign.data.loader import take
from jaxalign.data.sources.splits import split_by_prompt
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import join
from jaxalign.models.attention.dispatch import reads_branches
from jaxalign.models.model import Model
from jaxalign.parallel import hosts
from jaxalign.parallel.ahead import Ahead
from jaxalign.parallel.rows import fetch
from jaxalign.records import AnswerPairs, Comparison, Judgement, PackedParts
from jaxalign.stages.compare import labelled_pairs
from jaxalign.stages.shared import common, sources
from jaxalign.stages.shared.base import Stage, StageContext, write_json
from jaxalign.stages.shared.lm import place
from jaxalign.tracking.metrics import read_metrics
from jaxalign.training import work
from jaxalign.training.checkpoint import save_params
from jaxalign.training.direct_step import answer_logprobs, direct_step, sorts_the_batch
from jaxalign.training.optimizer import make_optimizer
from jaxalign.training.packed import pack_pairs
from jaxalign.training.state import abstract_state, init_state

BUCKET = 32
KTO_BALANCE = (1.0, 1.5)
"""Where the KTO paper wants desirable_weight * good answers over undesirable_weight * bad ones."""
BALANCE_SLACK = 2.0
"""Beyond this many times outside that range a warning is given."""


class DPO(Stage):
    name = "dpo"
    config_fields = (*common.MODEL_FIELDS, "data", "world", "preference.max_length", "dpo", "feedback.undecided")

    def inputs(self, config: Config) -> tuple[str, ...]:
        return (*common.policy_stages(config, self.name), *sources.made_in(config, "compare"))

    def files(self, config: Config):
        return common.base_files(config) | sources.data_files(config)

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.dpo
        tokenizer = common.load_tokenizer(context)
        model = common.make_model(config, tokenizer.vocab_size)
        judged = sources.is_judged(config)
        pairs, held_out, report = (sources.human_judgements if judged else labelled_split)(context, tokenizer)
        for sentence in report.sentences() if report else ():
            print(f"[{self.name}] {sentence}", flush=True)
        extra = {"data": report.to_dict()} if report else {}
        extra |= {"balance": balance(section, pairs)} if judged else {}
        make, measure = (judged_arrays, separation) if judged else (arrays, accuracy)
        train, held_out = (
            make(tokenizer, part, config.data.style, section, kto)
            for part, kto in ((pairs, section.objective == "kto"), (held_out, False))
        )
        loader = sources.pair_loader(config, pairs, section.batch, streams.LOADERS[self.name], len(train.label) // len(pairs))
        steps = loader.steps(section.epochs)
        optimizer = make_optimizer(section.optimizer, steps)

        def arguments(state, frozen, step: int):
            pairs, parts = packed(section, model, train, loader.indices(step))
            return model, optimizer, section, state, pairs, frozen, parts

        def step_fn(state, step: int):
            state, metrics = direct_step(*arguments(state, frozen, step))
            return state, {**metrics, "tokens": int(train.length[loader.indices(step)].sum())}

        loop = common.loop(
            context, model, steps, section.checkpoint_every, shown=("loss", "accuracy"),
            flops=lambda step: work.learning_pairs(model, take(train, loader.indices(step))),
        )  # fmt: skip
        with Ahead() as ahead:
            ahead.add(direct_step, lambda: arguments(*common.abstract_training(config, model, optimizer), 0))
            start = common.policy_params(context, model, self.name)
            frozen = common.frozen_params(context, model)
            train, held_out = (
                with_reference(context, section, model, start, part, name)
                for name, part in (("train", train), ("held_out", held_out))
            )
            state = loop.run(
                lambda: init_state(
                    model, optimizer, common.trained_params(context, model, start, self.name),
                    common.stage_key(config, self.name),
                ),
                abstract_state(model, optimizer), step_fn,
            )  # fmt: skip
        save_params(context.directory / "params", state.params)
        rows = read_metrics(context.directory / "metrics.jsonl")
        summary = {"steps": steps, "train_rows": len(train.label), "loss_first": rows[0]["loss"], "loss_last": rows[-1]["loss"]}
        summary["held_out"] = measure(section, model, join(frozen, state.params), held_out)
        write_json(context.directory / "summary.json", summary | extra)


def labelled_split(context: StageContext, tokenizer: Tokenizer):
    """(train, held out, report of the file) of the pairs that the policy learns from; no report for the world."""
    config = context.config
    if sources.made_in(config, "compare"):
        return *split_by_prompt(labelled_pairs(context), config.dpo.held_out_share, config.seed), None
    return sources.human_comparisons(context, tokenizer)


def balance(section: Dpo, judgements: Sequence[Judgement]) -> dict[str, float | int | None]:
    """How many of the answers to learn from are good and bad, and the weighted ratio of the two; warns where it is far from
    what the KTO paper wants (arXiv 2402.01306)."""
    good = sum(judgement.desirable for judgement in judgements)
    bad = len(judgements) - good
    weighted = section.desirable_weight * good, section.undesirable_weight * bad
    ratio = weighted[0] / weighted[1] if weighted[1] else None
    low, high = KTO_BALANCE
    if not ratio or not low / BALANCE_SLACK <= ratio <= high * BALANCE_SLACK:
        told = "without end" if ratio is None else f"{ratio:.3g}"
        advice = "give answers of both kinds, and weights above 0"
        if ratio:
            wanted = (low + high) / 2 * section.undesirable_weight * bad / good
            advice = f"config.dpo.desirable_weight {wanted:.3g} would bring it there"
        logging.getLogger("jaxalign").warning(
            f"dpo: {good} good answers of weight {section.desirable_weight:g} stand against {bad} bad ones of weight "
            f"{section.undesirable_weight:g}, a ratio {told}; KTO wants {low:g} to {high:g}: {advice}"
        )
    return {"desirable": good, "undesirable": bad, "ratio": ratio}


def oriented(pair: Comparison) -> Comparison:
    """The pair with the answer that the label leans to first."""
    if pair.label >= 0.5:
        return pair
    return dataclasses.replace(pair, response_a=pair.response_b, response_b=pair.response_a, label=1 - pair.label)


def arrays(tokenizer: Tokenizer, pairs: Sequence[Comparison], style: str, section: Dpo, kto: bool = False) -> AnswerPairs:
    """All pairs as numpy arrays, padded to one length; the reference's log-probs are 0.

    With `kto` each pair makes two rows, one an answer: first the answer itself, its label the probability that it is the
    better one, then an answer given to another prompt, from which KTO estimates its KL.
    """
    rows, labels = [], []
    for pair in map(oriented, pairs):
        prompt = styles.encode_prompt(tokenizer, pair.prompt.messages, style)
        answers = [styles.encode_answer(tokenizer, text, style) for text in (pair.response_a, pair.response_b)]
        rows.append([(prompt, answer) for answer in answers])
        labels.append(pair.label)
    if kto:
        singles = [side for row in rows for side in row]
        rows = [[(prompt, answer), (prompt, _mismatched(singles, i))] for i, (prompt, answer) in enumerate(singles)]
        labels = [side for label in labels for side in (label, 1 - label)]
    return _pad(rows, labels, section.max_length)


def judged_arrays(
    tokenizer: Tokenizer, judgements: Sequence[Judgement], style: str, section: Dpo, kto: bool = False
) -> AnswerPairs:
    """All judged answers as numpy arrays, one a row, first; the label is 1 for a good one. Second stands, with `kto`, an answer
    given to another prompt, else the answer again."""
    singles = [
        (styles.encode_prompt(tokenizer, one.prompt.messages, style), styles.encode_answer(tokenizer, one.response, style))
        for one in judgements
    ]
    second = [_mismatched(singles, i) if kto else answer for i, (_, answer) in enumerate(singles)]
    rows = [[(prompt, answer), (prompt, other)] for (prompt, answer), other in zip(singles, second, strict=True)]
    return _pad(rows, [float(one.desirable) for one in judgements], section.max_length)


def _mismatched(singles, i: int) -> list[int]:
    """The next answer that was given to another prompt than row i's. Raises UserError where there is none."""
    prompt = singles[i][0]
    for step in range(1, len(singles)):
        other, answer = singles[(i + step) % len(singles)]
        if other != prompt:
            return answer
    raise UserError("all answers are to one prompt, and kto needs answers to other prompts for its KL; give more prompts, or "
                    "choose another dpo.objective")


def _pad(rows, labels: Sequence[float], max_length: int) -> AnswerPairs:
    longest = max((len(prompt) + len(answer) for row in rows for prompt, answer in row), default=1)
    width = min(max_length, -(-longest // BUCKET) * BUCKET)
    shape = (len(rows), 2)
    tokens = np.zeros((*shape, width), np.int32)
    prompt_length, length = np.ones(shape, np.int32), np.ones(shape, np.int32)
    for i, row in enumerate(rows):
        for side, (prompt, answer) in enumerate(row):
            answer = answer[: width - 1]
            prompt = prompt[-(width - len(answer)) :]
            ids = [*prompt, *answer]
            tokens[i, side, : len(ids)], prompt_length[i, side], length[i, side] = ids, len(prompt), len(ids)
    ones = np.ones(len(rows), np.float32)
    return AnswerPairs(tokens, prompt_length, length, np.asarray(labels, np.float32), ones, np.zeros(shape, np.float32))


def with_reference(context: StageContext, section: Dpo, model: Model, params, pairs: AnswerPairs, name: str) -> AnswerPairs:
    """The pairs with the log-probabilities of their answers under the reference.

    They are computed once and kept in reference-NAME-HASH.npy, by the content of the pairs; the stage's manifest vouches
    for the weights. An interrupted run reads them back.
    """
    if section.reference == "none" or not len(pairs.label):
        return pairs
    digest = hashlib.sha256()
    for x in (pairs.tokens, pairs.prompt_length, pairs.length):
        digest.update(np.ascontiguousarray(x).tobytes())
    path = context.directory / f"reference-{name}-{digest.hexdigest()[:16]}.npy"
    if not hosts.once(path.exists):
        with common.timing(context, model).phase("score") as phase:
            found, written = all_logprobs(section, model, params, pairs), path.with_suffix(".tmp")
            phase.tokens, phase.flops = int(pairs.length.sum()), work.reading_pairs(model, pairs)

        def write() -> None:
            with open(written, "wb") as file:
                np.save(file, found)
            os.replace(written, path)

        hosts.once(write)
    return dataclasses.replace(pairs, reference=np.load(path))


def packed(section: Dpo, model: Model, pairs: AnswerPairs, index: np.ndarray) -> tuple[AnswerPairs, PackedParts]:
    """The pairs `index` on the devices, without their tokens, and these packed."""
    own = jax.tree.map(lambda x: x[index], pairs)
    branches = reads_branches(model.config, model.sharding)
    parts = pack_pairs(own, section.micro_batch_tokens, model.sharding, sorts_the_batch(section), branches)
    return place(model, dataclasses.replace(own, tokens=None)), parts


def all_logprobs(section: Dpo, model: Model, params, pairs: AnswerPairs) -> np.ndarray:
    """float32 [B, 2]: the log-probability of every answer."""
    out, batch = [], section.batch
    for start in range(0, len(pairs.label), batch):
        index = np.minimum(np.arange(start, start + batch), len(pairs.label) - 1)
        out.append(fetch(answer_logprobs(model, params, *packed(section, model, pairs, index)).logprobs))
    return np.concatenate(out)[: len(pairs.label)] if out else np.zeros((0, 2), np.float32)


def accuracy(section: Dpo, model: Model, params, pairs: AnswerPairs) -> dict | None:
    """How often the implicit reward prefers the answer that the label does: the log-probability less the reference's, a
    token where the objective is about means."""
    leaning = pairs.label > 0.5
    if not leaning.any():
        return None
    reward = all_logprobs(section, model, params, pairs) - pairs.reference
    if section.objective in ("ipo_mean", "orpo", "simpo"):  # They are about the mean of a token, not the sum.
        reward = reward / (pairs.length - pairs.prompt_length)
    reward = reward[leaning]
    right, total = int(np.sum(reward[:, 0] > reward[:, 1])), len(reward)
    low, high = wilson_interval(right, total)
    margin = float(np.mean(reward[:, 0] - reward[:, 1]) * section.beta)
    return {"pairs": total, "accuracy": right / total, "low": low, "high": high, "margin": margin}


def separation(section: Dpo, model: Model, params, judged: AnswerPairs) -> dict | None:
    """How often a good answer's implicit reward is above a bad one's, over all such two (ties count half), and by how much on
    the mean. None without both kinds."""
    good = judged.label > 0.5
    if not good.any() or good.all():
        return None
    reward = (all_logprobs(section, model, params, judged) - judged.reference)[:, 0]
    bad = np.sort(reward[~good])
    below = (np.searchsorted(bad, reward[good], "left") + np.searchsorted(bad, reward[good], "right")) / 2
    return {
        "desirable": int(good.sum()), "undesirable": len(bad), "accuracy": float(np.mean(below) / len(bad)),
        "margin": float((np.mean(reward[good]) - np.mean(bad)) * section.beta),
    }  # fmt: skip


STAGE = DPO()
