"""The gold reward model of the over-optimisation study, and its scores of the initial policy's answers."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from overoptimization_setup import Answers, Study, agreement, count

from jaxalign.data.chat import styles
from jaxalign.data.loader import take
from jaxalign.data.world import gold as judge
from jaxalign.errors import UserError
from jaxalign.models.model import Params, scalar_from_lm
from jaxalign.records import PairBatch
from jaxalign.stages.shared.base import write_json
from jaxalign.steps.checkpoint import copy_params, load_params, save_params

SPOILT = 2.0  # subtracted from the worth of a corrupted answer, a repeated sentence or a missing end


def worth(verdict: judge.GoldVerdict) -> float:
    """Return the true value of an answer: 2 for the correct action, -2 for harm, minus 1 for rudeness and 1 for rambling."""
    if verdict.helpful or verdict.good_refusal:
        core = 2.0
    elif verdict.harmful or verdict.unclear:
        core = -2.0
    else:
        core = -1.0 if verdict.wrong_refusal or verdict.evasive else 0.0
    return core - (not verdict.courteous) - (not verdict.focused)


def spoil(text: str, rng: random.Random) -> str:
    """Corrupt an answer in a way that the rules do not detect: repeat, shuffle or truncate it."""
    words, sentences = text.split(), [sentence + "." for sentence in split_sentences(text)]
    kind = rng.choice(("repeat", "shuffle", "cut"))
    if kind == "repeat" and sentences:
        return " ".join([text, *rng.choices(sentences, k=rng.randint(1, 3))])
    if kind == "shuffle":
        return " ".join(rng.sample(words, len(words)))
    return " ".join(words[: rng.randint(0, max(0, len(words) - 3))])


def gold_pairs(study: Study) -> PairBatch:
    """Make all six pairs of four answers to each prompt, with the label sigmoid(worth of the first - worth of the second).

    The four answers: at temperature 1, at the initial policy's temperature, at a higher one, and the first one corrupted. The
    gold model therefore sees answers that the initial policy rarely gives and that the proxies never see.
    """
    settings, tokenizer, rng = study.settings, study.tokenizer, random.Random(study.settings.seed)
    prompts, ids = study.prompts["gold"], study.ids["gold"]
    encoded, values = [], []
    for number, temperature in enumerate((1.0, settings.temperature, settings.temperature + 0.3)):
        texts, ended = [], []
        for rollout, rows in study.rollouts(study.start, ids, study.key(number), temperature):
            texts += styles.response_texts(tokenizer, rollout)[:rows]
            ended += list(rollout.ended[:rows])
        encoded.append([answer_ids(study, i, text, end) for i, text, end in zip(ids, texts, ended, strict=True)])
        judged = [worth(judge.judge(study.world, p, t)) for p, t in zip(prompts, texts, strict=True)]
        broken = [not end or len(set(s)) < len(s) for s, end in zip(map(split_sentences, texts), ended, strict=True)]
        values.append([w - SPOILT * b for w, b in zip(judged, broken, strict=True)])
        if number == 0:
            spoilt = [spoil(text, rng) for text in texts]
    encoded.append([answer_ids(study, i, text, True) for i, text in zip(ids, spoilt, strict=True)])
    values.append([worth(judge.judge(study.world, p, t)) - SPOILT for p, t in zip(prompts, spoilt, strict=True)])
    tokens, length = padded([row for answers in zip(*encoded, strict=True) for row in answers], study.width)
    first, second = np.triu_indices(4, 1)
    base = 4 * np.arange(len(prompts))[:, None]
    index = np.stack([base + first, base + second], axis=-1).reshape(-1, 2)
    value = np.asarray(values).T.reshape(-1)[index]
    label = 1 / (1 + np.exp(value[:, 1] - value[:, 0]))
    return PairBatch(tokens[index], length[index], label.astype(np.float32), np.ones(len(label), np.float32))


def split_sentences(text: str) -> list[str]:
    return [part.strip() for part in text.split(".") if part.strip()]


def answer_ids(study: Study, prompt: list[int], text: str, ended: bool) -> list[int]:
    ids = prompt + styles.encode_answer(study.tokenizer, text, study.config.data.style)
    return (ids if ended else ids[:-1])[: study.width]


def padded(rows: Sequence[list[int]], width: int) -> Answers:
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return Answers(tokens, np.asarray([len(row) for row in rows], np.int32))


def gold_model(study: Study) -> Params:
    """Train the gold reward model: the initial policy's trunk with a scalar head."""
    folder = study.out / "gold"
    if not (folder / "summary.json").exists():
        pairs = gold_pairs(study)
        cut = len(pairs.label) // 10 // 6 * 6  # whole prompts
        trunk = scalar_from_lm(copy_params(study.start), study.scorer.init(study.key(10)))
        settings = study.settings
        train = take(pairs, slice(cut, None))
        params, last = study.learn(study.scorer, trunk, train, settings.gold_steps, settings.gold_learning_rate, 11)
        save_params(folder / "params", params)
        summary = {"pairs": len(train.label), **agreement(study, study.scorer, params, take(pairs, slice(0, cut)))}
        write_json(folder / "summary.json", summary | {"parameters": count(params), "train_loss": last["loss"]})
        print(f"[gold] agrees with the truth on {summary['held_out_accuracy']:.0%} of pairs", file=sys.stderr, flush=True)
    return load_params(folder / "params", study.scorer)


class Start(NamedTuple):
    """Sample and score answers. best_*: n answers to each held-out prompt; pair_*: two different answers to each RL prompt.

    gold is the raw score; label is 1 if the first answer won, with probability sigmoid(gold of the first - gold of the second).
    """

    best_tokens: np.ndarray
    best_length: np.ndarray
    best_gold: np.ndarray
    pair_tokens: np.ndarray
    pair_length: np.ndarray
    pair_gold: np.ndarray
    pair_label: np.ndarray


def start_answers(study: Study, gold: Params) -> Start:
    path, settings = study.out / "start.npz", study.settings
    if not path.exists():
        ids = [row for row in study.ids["measure"] for _ in range(settings.best_of)]
        best = study.answers(study.start, ids, study.key(20), settings.temperature)
        wanted = study.wanted_pairs
        twice = [row for row in study.ids["pairs"] for _ in range(2)]
        drawn = study.answers(study.start, twice, study.key(21), settings.temperature)
        tokens, length = drawn.tokens.reshape(-1, 2, study.width), drawn.length.reshape(-1, 2)
        differ = np.flatnonzero(np.any(tokens[:, 0] != tokens[:, 1], axis=1))[:wanted]
        if len(differ) < wanted:
            raise UserError(f"only {len(differ)} of {len(tokens)} pairs have different answers; {wanted} are needed; "
                            "the policy in the work directory has too little entropy")
        tokens, length = tokens[differ], length[differ]
        raw = study.scores(study.scorer, gold, Answers(tokens.reshape(-1, study.width), length.reshape(-1))).reshape(-1, 2)
        odds = 1 / (1 + np.exp(raw[:, 1] - raw[:, 0]))
        label = (np.random.default_rng([settings.seed, 1]).random(wanted) < odds).astype(np.float32)
        made = Start(*best, study.scores(study.scorer, gold, best), tokens, length, raw, label)
        unfinished = path.with_name("start.tmp.npz")
        np.savez_compressed(unfinished, **made._asdict())
        os.replace(unfinished, path)
    with np.load(path) as found:
        return Start(**found)
