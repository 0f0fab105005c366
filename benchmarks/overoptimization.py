"""Does the true score turn while the proxy that is optimised still rises? Gao, Schulman and Hilton 2022 (arXiv 2210.10760).

    python benchmarks/overoptimization.py --workdir=runs/quickstart --out=runs/overoptimization

The work directory is a finished run of the main job: from it come the tokenizer, the world's prompts and the supervised
policy, which is the start. A gold reward model on that policy's trunk learns from the world's known truth. It labels pairs
of the start's answers, and proxies of 3 sizes learn from 3 numbers of these. Against each proxy there is best-of-n and RL
without a KL penalty; the gold model says what that was worth. docs/overoptimization.md shows and explains the outcome.

Each proxy's part is saved as it ends; the same command goes on from there. Written to --out: gold/, start.npz, a folder a
proxy with result.json, and of all of them summary.json, table.md and overoptimization.svg.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from overoptimization_plot import plot

from jaxalign.algorithms.best_of_n import analytic_kl, expected_best_of
from jaxalign.algorithms.overoptimization import fit, peak
from jaxalign.algorithms.rewards import score_statistics
from jaxalign.config import Config, Optimizer, Ppo, from_config_dict
from jaxalign.config_checks import check
from jaxalign.data.loader import EpochLoader, take
from jaxalign.data.world import gold as judge
from jaxalign.errors import UserError
from jaxalign.models.decoder import DecoderConfig
from jaxalign.models.model import Model, Params, scalar_from_lm
from jaxalign.records import PairBatch, Prompt, Rollout
from jaxalign.rollout.engine import Engine
from jaxalign.rollout.sampling import Sampling
from jaxalign.stages import common, sources
from jaxalign.stages.base import StageContext, read_manifest, write_json
from jaxalign.stages.ppo import Iteration
from jaxalign.training.checkpoint import copy_params, load_params, save_params
from jaxalign.training.experience import response_mask, response_stats
from jaxalign.training.optimizer import make_optimizer
from jaxalign.training.ppo_state import PPOSetup, init_ppo_state
from jaxalign.training.preference_step import preference_step, score_sequences
from jaxalign.training.state import init_state

CHUNK = 256  # rows of one call of the engine or of a reward model


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that decides the outcome, beside the work directory. A folder holds the results of one of these."""

    seed: int = 0
    sizes: tuple[tuple[int, int], ...] = ((1, 16), (2, 32), (2, 64))  # layers, width of the proxies
    pairs: tuple[int, ...] = (128, 512, 2048)  # comparisons that they learn from
    held_out_pairs: int = 512
    temperature: float = 1.3  # of the start, and so of every policy
    max_new_tokens: int = 56
    gold_prompts: int = 1024
    gold_steps: int = 300
    proxy_steps: int = 200  # at most, and at most proxy_epochs passes over the comparisons
    proxy_epochs: int = 20
    pair_batch: int = 32
    learning_rate: float = 1e-3
    gold_learning_rate: float = 5e-4
    measured_prompts: int = 64
    best_of: int = 128
    measured_at: tuple[int, ...] = (0, 2, 4, 6, 9, 12, 16, 20, 26, 33, 40)  # iterations of RL; it ends with the last
    rl_answers: int = 4  # to each measured prompt
    rl: Ppo = Ppo(
        prompts=1024, batch=32, group_size=4, advantages="rloo", kl_coef=0.0, missing_eos="none", epochs=1, minibatches=1,
        optimizer=Optimizer(learning_rate=3e-4, schedule="constant", eps=1e-5),
    )  # fmt: skip


class Answers(NamedTuple):
    """Prompts with their answers: int32 tokens [B, T], padded on the right, and length [B]."""

    tokens: np.ndarray
    length: np.ndarray


class Study:
    """What all parts share: the run's models and prompts, and how answers are drawn and scored."""

    def __init__(self, workdir: Path, out: Path, settings: Settings):
        self.settings, self.out = settings, out
        rl = dataclasses.replace(
            settings.rl, iterations=settings.measured_at[-1], temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
        )  # fmt: skip
        config = dataclasses.replace(read_config(workdir), seed=settings.seed, ppo=rl)
        check(config)
        self.context = StageContext(config, workdir, out, False)
        self.config = config
        self.tokenizer = common.load_tokenizer(self.context)
        self.policy = common.make_model(config, self.tokenizer.vocab_size)
        self.scorer = self.policy.with_head("scalar")
        self.start = common.stage_params(self.context, "sft", self.policy)
        self.world = common.world_of(read_config(workdir))
        self.wanted_pairs = max(settings.pairs) + settings.held_out_pairs
        self.pair_prompts = -(-self.wanted_pairs * 5 // 4)  # Pairs of equal answers are left out.
        self.prompts = {
            "gold": self.world.prompts("compare", settings.gold_prompts),
            "rl": self.world.prompts("rl", rl.prompts),
            "pairs": self.world.prompts("rl", rl.prompts + self.pair_prompts)[rl.prompts :],
            "measure": self.world.prompts("evaluate", settings.measured_prompts),
        }
        self.ids = {name: [self.encode(prompt) for prompt in found] for name, found in self.prompts.items()}
        longest = max(len(row) for rows in self.ids.values() for row in rows)
        self.engine = Engine(self.policy, CHUNK, config.model.max_length, bucket=-(-longest // 8) * 8)
        self.width = self.engine.bucket + settings.max_new_tokens
        updates = rl.iterations * rl.epochs * rl.minibatches
        optimizer = make_optimizer(rl.optimizer, updates)
        # One setup for all proxies, so that RL compiles once: their scores come in from outside.
        self.setup = PPOSetup(self.policy, self.scorer, optimizer, optimizer, rl, 0.0, 1.0)

    def encode(self, prompt: Prompt) -> list[int]:
        return sources.encode_prompt(self.tokenizer, prompt.messages, self.config.data.style)

    def key(self, stream: int) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.settings.seed), stream)

    def rollouts(self, params: Params, ids: Sequence[list[int]], key: jax.Array, temperature: float):
        """(rollout on the host, rows that count), chunk by chunk."""
        sampling = Sampling(self.settings.max_new_tokens, (self.tokenizer.eos_id,), temperature)
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            rows = range(start, start + len(chunk))
            yield jax.device_get(self.engine.rollout(params, chunk, key, rows, sampling)), len(chunk)

    def answers(self, params: Params, ids: Sequence[list[int]], key: jax.Array, temperature: float) -> Answers:
        """One answer a prompt."""
        parts = [(r.tokens[:n], (r.prompt_length + r.response_length)[:n])
                 for r, n in self.rollouts(params, ids, key, temperature)]  # fmt: skip
        return Answers(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def scores(self, model: Model, params: Params, answers: Answers) -> np.ndarray:
        """float32 [B], raw."""
        out = []
        for start in range(0, len(answers.length), CHUNK):
            index = np.minimum(np.arange(start, start + CHUNK), len(answers.length) - 1)
            out.append(np.asarray(score_sequences(model, params, answers.tokens[index], answers.length[index])))
        return np.concatenate(out)[: len(answers.length)]

    def learn(self, model: Model, params: Params, pairs: PairBatch, steps: int, rate: float, stream: int):
        """(parameters of a reward model trained on the pairs, means of its last 10 steps)."""
        optimizer = preference_optimizer(rate, steps)
        loader = EpochLoader(len(pairs.label), self.settings.pair_batch, self.settings.seed, stream)
        state, last = init_state(model, optimizer, params, self.key(stream)), []
        for step in range(steps):
            state, metrics = preference_step(model, optimizer, 1, 0.01, state, take(pairs, loader.indices(step)))
            last = [*last[-9:], metrics]
        means = {name: float(np.mean([float(row[name]) for row in last])) for name in ("loss", "accuracy")}
        return state.params, means


@functools.cache
def preference_optimizer(rate: float, steps: int):
    """One object for equal settings, so that training compiles once a size."""
    return make_optimizer(Optimizer(learning_rate=rate, schedule="linear", warmup_steps=10), steps)


def read_config(workdir: Path) -> Config:
    """The config of a finished run on the embedded world. Raises UserError where it is not one."""
    path = workdir / "config.json"
    if not path.exists() or read_manifest(workdir / "sft") is None or not (workdir / "sft" / "params").exists():
        raise UserError(f"{workdir} holds no finished supervised policy; run python -m jaxalign.train --workdir={workdir}")
    config = from_config_dict(json.loads(path.read_text(encoding="utf-8")))
    if config.data.source != "world" or config.model.source != "scratch":
        raise UserError(f"{workdir} is not a run on the embedded world (data.source=world, model.source=scratch), whose "
                        "truth the gold reward model learns from; give the folder of the main job")  # fmt: skip
    return config


# The gold reward model


def worth(verdict: judge.Verdict) -> float:
    """The truth in one number: what an answer does (2 for the right thing, -2 for harm), less 1 for each fault of manner."""
    if verdict.helpful or verdict.good_refusal:
        core = 2.0
    elif verdict.harmful or verdict.unclear:
        core = -2.0
    else:
        core = -1.0 if verdict.wrong_refusal or verdict.evasive else 0.0
    return core - (not verdict.courteous) - (not verdict.focused)


def spoil(text: str, rng: random.Random) -> str:
    """An answer made worse in a way that the rules do not see: repeated, shuffled, or broken off."""
    words, sentences = text.split(), [part.strip() + "." for part in text.split(".") if part.strip()]
    kind = rng.choice(("repeat", "shuffle", "cut"))
    if kind == "repeat" and sentences:
        return " ".join([text, *rng.choices(sentences, k=rng.randint(1, 3))])
    if kind == "shuffle":
        return " ".join(rng.sample(words, len(words)))
    return " ".join(words[: rng.randint(0, max(0, len(words) - 3))])


SPOILT = 2.0  # what spoiling takes off the worth, and a repeated sentence or a missing end of the policy's own


def gold_pairs(study: Study) -> PairBatch:
    """All six pairs of four answers to each prompt, with the label sigmoid(worth of the first - worth of the second).

    The four: at temperature 1, at the start's, at a higher one, and the first spoilt. So the gold model has seen more than the
    proxies ever will.
    """
    settings, tokenizer, rng = study.settings, study.tokenizer, random.Random(study.settings.seed)
    prompts, ids = study.prompts["gold"], study.ids["gold"]
    rows, values = [], []
    for number, temperature in enumerate((1.0, settings.temperature, settings.temperature + 0.3)):
        texts, ended = [], []
        for rollout, count in study.rollouts(study.start, ids, study.key(number), temperature):
            texts += sources.response_texts(tokenizer, rollout)[:count]
            ended += list(rollout.ended[:count])
        rows.append([answer_ids(study, i, text, end) for i, text, end in zip(ids, texts, ended, strict=True)])
        judged = [worth(judge.judge(study.world, p, t)) for p, t in zip(prompts, texts, strict=True)]
        broken = [not end or len(set(s)) < len(s) for s, end in zip(map(split_sentences, texts), ended, strict=True)]
        values.append([w - SPOILT * b for w, b in zip(judged, broken, strict=True)])
        if number == 0:
            spoilt = [spoil(text, rng) for text in texts]
    rows.append([answer_ids(study, i, text, True) for i, text in zip(ids, spoilt, strict=True)])
    values.append([worth(judge.judge(study.world, p, t)) - SPOILT for p, t in zip(prompts, spoilt, strict=True)])
    tokens, length = padded([row for answers in zip(*rows, strict=True) for row in answers], study.width)
    first, second = np.triu_indices(4, 1)
    base = 4 * np.arange(len(prompts))[:, None]
    index = np.stack([base + first, base + second], axis=-1).reshape(-1, 2)
    value = np.asarray(values).T.reshape(-1)[index]
    label = 1 / (1 + np.exp(value[:, 1] - value[:, 0]))
    return PairBatch(tokens[index], length[index], label.astype(np.float32), np.ones(len(label), np.float32))


def split_sentences(text: str) -> list[str]:
    return [part.strip() for part in text.split(".") if part.strip()]


def answer_ids(study: Study, prompt: list[int], text: str, ended: bool) -> list[int]:
    ids = prompt + sources.encode_answer(study.tokenizer, text, study.config.data.style)
    return (ids if ended else ids[:-1])[: study.width]


def padded(rows: Sequence[list[int]], width: int) -> Answers:
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return Answers(tokens, np.asarray([len(row) for row in rows], np.int32))


def gold_model(study: Study) -> Params:
    """The gold reward model: the start's trunk under a scalar head."""
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
        print(f"[gold] {summary}", flush=True)
    return load_params(folder / "params", study.scorer)


def agreement(study: Study, model: Model, params: Params, pairs: PairBatch) -> dict:
    """How often a reward model prefers the answer that the labels prefer, where they lean one way."""
    decided = np.abs(pairs.label - 0.5) > 0.1
    tokens, length = pairs.tokens[decided], pairs.length[decided]
    flat = Answers(tokens.reshape(-1, tokens.shape[-1]), length.reshape(-1))
    scores = study.scores(model, params, flat).reshape(-1, 2)
    right = (scores[:, 0] > scores[:, 1]) == (pairs.label[decided] > 0.5)
    return {"held_out_pairs": int(decided.sum()), "held_out_accuracy": float(right.mean())}


def count(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


# What every proxy meets: the start's answers, and the comparisons


class Start(NamedTuple):
    """best_*: n answers to each measured prompt, prompt by prompt; pair_*: two different answers to each RL prompt.

    gold is raw; label is 1 where the first answer won, drawn with probability sigmoid(gold of the first - of the second).
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
            raise UserError(f"only {len(differ)} of {len(tokens)} pairs of answers differ and {wanted} are needed; the policy "
                            "in the work directory is too sure of its answers")  # fmt: skip
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


# One proxy


@dataclasses.dataclass(frozen=True)
class Scored:
    """A reward model with the mean and deviation of its scores at the start; both are taken off what it gives."""

    model: Model
    params: Params
    shift: float
    scale: float


    @classmethod
    def over(cls, model: Model, params: Params, raw: np.ndarray) -> Scored:
        """raw: its scores of the start's answers."""
        return cls(model, params, *(float(x) for x in score_statistics(raw)))

    def normal(self, raw: np.ndarray) -> np.ndarray:
        return (raw - self.shift) / self.scale


def proxy_model(study: Study, layers: int, width: int) -> Model:
    heads = max(1, width // 16)
    return Model(DecoderConfig(study.tokenizer.vocab_size, layers, width, heads, heads, 16, 3 * width), "scalar")


def run_proxy(study: Study, gold: Scored, start: Start, size: tuple[int, int], pairs: int) -> dict:
    """Trains one proxy and optimises against it: what its result.json holds."""
    settings, began = study.settings, time.process_time()
    model = proxy_model(study, *size)
    number = 100 + 10 * settings.sizes.index(size) + settings.pairs.index(pairs)
    all_pairs = PairBatch(start.pair_tokens, start.pair_length, start.pair_label, np.ones(len(start.pair_label), np.float32))
    train = take(all_pairs, slice(0, pairs))
    fresh = model.init(study.key(number))
    steps = min(settings.proxy_steps, settings.proxy_epochs * pairs // settings.pair_batch)
    params, last = study.learn(model, fresh, train, steps, settings.learning_rate, number)
    held = take(all_pairs, slice(-settings.held_out_pairs, None))
    truth = 1 / (1 + np.exp(start.pair_gold[-settings.held_out_pairs :] @ np.array([-1.0, 1.0])))
    raw = study.scores(model, params, Answers(start.best_tokens, start.best_length))
    proxy = Scored.over(model, params, raw)
    by_prompt = (len(study.ids["measure"]), settings.best_of)
    result = {
        "size": f"{size[0]}x{size[1]}", "pairs": pairs, "parameters": count(params), "train_loss": last["loss"],
        **agreement(study, model, params, dataclasses.replace(held, label=truth.astype(np.float32))),
        "best_of_n": best_of_n(proxy.normal(raw).reshape(by_prompt), gold.normal(start.best_gold).reshape(by_prompt)),
    }  # fmt: skip
    result["rl"] = reinforce(study, proxy, gold, study.out / name_of(size, pairs))
    return result | {"cpu_seconds": time.process_time() - began}


def name_of(size: tuple[int, int], pairs: int) -> str:
    return f"{size[0]}x{size[1]}-{pairs}"


def best_of_n(proxy: np.ndarray, gold: np.ndarray) -> list[dict]:
    """For n = 1, 2, .. (about four an octave) the expected proxy and gold score of the proxy's choice among n, [P, N] each."""
    most = proxy.shape[1]
    counts = sorted({min(most, round(2 ** (i / 4))) for i in range(4 * most.bit_length())})
    return [
        {
            "n": n,
            "kl": float(analytic_kl(n)),
            "proxy": float(jnp.mean(expected_best_of(proxy, n))),
            "gold": float(jnp.mean(expected_best_of(proxy, n, gold))),
        }
        for n in counts
    ]


@functools.partial(jax.jit, static_argnames=("model", "temperature"))
def kl_to_start(model: Model, start: Params, rollout: Rollout, temperature: float) -> jax.Array:
    """float32 [B]: log policy - log start of each sampled answer, whose mean is the KL, in nats."""
    theirs = response_stats(model, start, rollout, temperature).logprobs
    return jnp.sum((rollout.logprobs - theirs) * response_mask(rollout), axis=1)


def reinforce(study: Study, proxy: Scored, gold: Scored, folder: Path) -> list[dict]:
    """RL against a proxy; what fresh answers to the measured prompts are like every few iterations."""
    settings = study.settings
    folder.mkdir(parents=True, exist_ok=True)

    def reward(rollout: Rollout, index: Sequence[int]):
        length = jnp.maximum(rollout.prompt_length + rollout.response_length, 1)
        return proxy.normal(score_sequences(proxy.model, proxy.params, rollout.tokens, length)), None

    context = dataclasses.replace(study.context, directory=folder)
    iteration = Iteration(context, study.setup, study.start, reward, study.ids["rl"], study.tokenizer)
    state = init_ppo_state(study.setup, copy_params(study.start), None, study.key(30))
    points = []
    for step in range(settings.measured_at[-1] + 1):
        if step in settings.measured_at:
            points.append({"iteration": step, **measure(study, state.policy.params, proxy, gold, step)})
        if step < settings.measured_at[-1]:
            state, _ = iteration(state, step)
    return points


def measure(study: Study, params: Params, proxy: Scored, gold: Scored, step: int) -> dict:
    settings = study.settings
    ids = [row for row in study.ids["measure"] for _ in range(settings.rl_answers)]
    kls, columns = [], {"proxy": [], "gold": []}
    lengths, text = [], None
    for rollout, rows in study.rollouts(params, ids, study.key(1000 + step), settings.temperature):
        kls.append(np.asarray(kl_to_start(study.policy, study.start, rollout, settings.temperature))[:rows])
        lengths.append(rollout.response_length[:rows])
        answers = Answers(rollout.tokens[:rows], (rollout.prompt_length + rollout.response_length)[:rows])
        for name, one in (("proxy", proxy), ("gold", gold)):
            columns[name].append(one.normal(study.scores(one.model, one.params, answers)))
        text = text or sources.response_texts(study.tokenizer, rollout)[0]
    means = {name: float(np.mean(np.concatenate(values))) for name, values in columns.items()}
    return {"kl": float(np.mean(np.concatenate(kls))), **means, "length": float(np.mean(np.concatenate(lengths))),
            "example": text}  # fmt: skip


# All of them


def run_study(workdir: Path, out: Path, settings: Settings) -> list[dict]:
    """Does what is left to do; the results of all proxies. Raises UserError where `out` holds another study."""
    asked = json.loads(json.dumps(dataclasses.asdict(settings))) | {"workdir": read_manifest(workdir / "sft").output_hash}
    path = out / "settings.json"
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != asked:
        raise UserError(f"{out} holds a study with other settings or of another run; choose another --out")
    study = Study(workdir, out, settings)
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, asked)
    gold_params = gold_model(study)
    start = start_answers(study, gold_params)
    gold = Scored.over(study.scorer, gold_params, start.best_gold)
    results = []
    for size in settings.sizes:
        for pairs in settings.pairs:
            path = out / name_of(size, pairs) / "result.json"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, run_proxy(study, gold, start, size, pairs))
            results.append(json.loads(path.read_text(encoding="utf-8")))
            print(f"[{name_of(size, pairs)}] {sentence(results[-1])}", flush=True)
    return results


def sentence(result: dict) -> str:
    told = []
    for method in ("best_of_n", "rl"):
        rows = result[method]
        top, last = max(rows, key=lambda row: row["gold"]), rows[-1]
        told.append(f"{method}: proxy {last['proxy']:.2f}, gold {top['gold']:.2f} at KL {top['kl']:.1f}, "
                    f"{last['gold']:.2f} at {last['kl']:.1f}")  # fmt: skip
    return f"{result['cpu_seconds']:.0f} s of CPU time, agreement {result['held_out_accuracy']:.2f}; " + "; ".join(told)


def fitted(result: dict) -> dict:
    """The result with the fit of each method and its peak beside it."""
    fits = {}
    for method in ("best_of_n", "rl"):
        rows = result[method]
        distance = np.sqrt(np.maximum([row["kl"] for row in rows], 0))
        found = fit(distance, [row["gold"] for row in rows], method)
        fits[method] = found._asdict() | {"peak": peak(found.alpha, found.beta, method)._asdict()}
    return result | {"fits": fits}


def table(results: Sequence[dict]) -> str:
    """One line a proxy and method, in markdown."""
    lines = [
        "| proxy | parameters | comparisons | agrees with gold | method | alpha | beta | R^2 | d of the peak | "
        "best gold seen | last gold | last proxy | last d |",
        "|" + "---|" * 13,
    ]
    for result in results:
        for method, title in (("best_of_n", "best of n"), ("rl", "RL")):
            one, rows = result["fits"][method], result[method]
            at = one["peak"]["distance"]
            cells = [
                result["size"], f"{result['parameters']:,}", str(result["pairs"]), f"{100 * result['held_out_accuracy']:.0f}%",
                title, f"{one['alpha']:.2f}", f"{one['beta']:.2f}", f"{one['r_squared']:.2f}",
                f"{at:.2f}" if at < 1e3 else "none", f"{max(row['gold'] for row in rows):.2f}", f"{rows[-1]['gold']:.2f}",
                f"{rows[-1]['proxy']:.2f}", f"{max(rows[-1]['kl'], 0) ** 0.5:.2f}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None, tell: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workdir", type=Path, default=Path("runs/quickstart"), help="a finished run of the main job")
    parser.add_argument("--out", type=Path, default=Path("runs/overoptimization"), help="where the study is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    options = parser.parse_args(arguments)
    try:
        results = [fitted(result) for result in run_study(options.workdir, options.out, Settings(seed=options.seed))]
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    write_json(options.out / "summary.json", results)
    (options.out / "table.md").write_text(table(results), encoding="utf-8")
    (options.out / "overoptimization.svg").write_text(plot(results), encoding="utf-8")
    tell(json.dumps(results, indent=2) if options.json else table(results))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
