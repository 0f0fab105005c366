"""Measure reward over-optimisation: when the true score falls while the proxy rises (Gao et al. 2022, arXiv 2210.10760).

    python benchmarks/overoptimization.py --workdir=runs/quickstart --out=runs/overoptimization

The work directory is a finished default run, which provides the tokenizer, the world's prompts and the supervised policy, the
initial policy of the study ("start"). A gold reward model on that policy's trunk is trained on the world's known truth. It
labels pairs of the initial policy's answers, and proxies of 3 sizes are trained on 3 numbers of these pairs. Each proxy is
optimised by best-of-n and by RL without a KL penalty, and the gold model scores the results. docs/overoptimization.md shows and
explains them.

The results of each proxy are saved when it ends; the same command resumes from there. Written to --out: gold/, start.npz, a
folder per proxy with result.json, and summary.json, table.md and overoptimization.svg over all proxies.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from overoptimization_fit import fit, peak
from overoptimization_gold import Start, gold_model, start_answers
from overoptimization_plot import plot
from overoptimization_setup import Answers, Settings, Study, agreement, count, read_config

from jaxalign import streams
from jaxalign.algorithms.best_of_n import analytic_kl, expected_best_of
from jaxalign.algorithms.rewards import score_statistics
from jaxalign.data.chat import styles
from jaxalign.data.loader import take
from jaxalign.errors import UserError
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.model import Model, Params
from jaxalign.records import PairBatch, Rollout
from jaxalign.rewards.base import Reward, RewardBatch
from jaxalign.rewards.base import Scored as Scores
from jaxalign.rewards.scorer import Scorer, raw_rollout_scores
from jaxalign.rl.iteration import Iteration, PromptStream
from jaxalign.rl.responses import response_mask, response_stats
from jaxalign.rl.state import init_ppo_state
from jaxalign.rollout.sampler import Engine, LocalSampler
from jaxalign.stages.shared import engines
from jaxalign.stages.shared.base import write_json
from jaxalign.stages.shared.manifest import read_manifest
from jaxalign.steps.checkpoint import copy_params
from jaxalign.steps.offload import FrozenRole


@dataclasses.dataclass(frozen=True)
class Scored:
    """A reward model whose scores are normalised by their mean and deviation under the initial policy."""

    model: Model
    params: Params
    shift: float
    scale: float

    @classmethod
    def over(cls, model: Model, params: Params, raw: np.ndarray) -> Scored:
        """raw: its scores of the initial policy's answers."""
        return cls(model, params, *(float(x) for x in score_statistics(raw)))

    def normal(self, raw: np.ndarray) -> np.ndarray:
        return (raw - self.shift) / self.scale


def proxy_model(study: Study, layers: int, width: int) -> Model:
    heads = max(1, width // 16)
    return Model(DecoderConfig(study.tokenizer.vocab_size, layers, width, heads, heads, 16, 3 * width), "scalar")


def run_proxy(study: Study, gold: Scored, start: Start, size: tuple[int, int], pairs: int) -> dict:
    """Train one proxy, optimise against it and return the content of its result.json."""
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
    }
    result["rl"] = reinforce(study, proxy, gold, study.out / name_of(size, pairs))
    return result | {"cpu_seconds": time.process_time() - began}


def name_of(size: tuple[int, int], pairs: int) -> str:
    return f"{size[0]}x{size[1]}-{pairs}"


def best_of_n(proxy: np.ndarray, gold: np.ndarray) -> list[dict]:
    """Return the expected proxy and gold scores of the proxy's best of n, for n = 1, 2, .. (about four per octave)."""
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
    """Return float32 [B]: log policy - log start of each sampled answer, in nats; the mean is the KL."""
    theirs = response_stats(model, start, rollout, temperature).logprobs
    return jnp.sum((rollout.logprobs - theirs) * response_mask(rollout), axis=1)


class ProxyReward(Reward):
    """Return the proxy's scores on the scale of the gold model."""

    def __init__(self, proxy: Scored):
        self.name = "proxy"
        self.proxy = proxy

    def score(self, batch: RewardBatch) -> Scores:
        raw = raw_rollout_scores(Scorer(self.proxy.model), self.proxy.params, batch.rollout)
        return Scores(self.proxy.normal(raw))


def reinforce(study: Study, proxy: Scored, gold: Scored, folder: Path) -> list[dict]:
    """Run RL against a proxy and measure fresh answers to the held-out prompts every few iterations."""
    settings = study.settings
    folder.mkdir(parents=True, exist_ok=True)

    section, config = study.setup.config, study.context.config
    stream = PromptStream(
        study.prompts["rl"], study.ids["rl"], section.batch, section.group_size, config.seed, streams.LOADERS["ppo"]
    )
    engine = Engine(study.setup.policy, section.batch, config.model.max_length, stream.width)
    iteration = Iteration(
        study.setup, stream, LocalSampler(engine), engine.padding,
        engines.sampling(section, study.tokenizer, config.data.style),
        ProxyReward(proxy), study.tokenizer, FrozenRole(study.start),
    )
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
        text = text or styles.response_texts(study.tokenizer, rollout)[0]
    means = {name: float(np.mean(np.concatenate(values))) for name, values in columns.items()}
    return {"kl": float(np.mean(np.concatenate(kls))), **means, "length": float(np.mean(np.concatenate(lengths))),
            "example": text}


def run_study(workdir: Path, out: Path, settings: Settings) -> list[dict]:
    """Complete the study and return the results of all proxies. Raises UserError if `out` contains another study."""
    read_config(workdir)
    asked = json.loads(json.dumps(dataclasses.asdict(settings))) | {"workdir": read_manifest(workdir / "sft").output_hash}
    path = out / "settings.json"
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != asked:
        raise UserError(f"{out} contains a study with other settings or of another run; choose another --out")
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
            print(f"[{name_of(size, pairs)}] {sentence(results[-1])}", file=sys.stderr, flush=True)
    return results


def sentence(result: dict) -> str:
    sentences = []
    for method in ("best_of_n", "rl"):
        rows = result[method]
        top, last = max(rows, key=lambda row: row["gold"]), rows[-1]
        sentences.append(f"{method}: proxy {last['proxy']:.2f}, gold {top['gold']:.2f} at KL {top['kl']:.1f}, "
                         f"{last['gold']:.2f} at {last['kl']:.1f}")
    return f"{result['cpu_seconds']:.0f} s of CPU time, agreement {result['held_out_accuracy']:.2f}; " + "; ".join(sentences)


def fitted(result: dict) -> dict:
    """Return the result with the fit and peak of each method; null for values that do not exist (no peak, no variance)."""

    def number(x: float) -> float | None:
        return x if math.isfinite(x) else None

    fits = {}
    for method in ("best_of_n", "rl"):
        rows = result[method]
        distance = np.sqrt(np.maximum([row["kl"] for row in rows], 0))
        found = fit(distance, [row["gold"] for row in rows], method)
        top = peak(found.alpha, found.beta, method)
        named = found._asdict() | {"peak_distance": top.distance, "peak_gold": top.gold}
        fits[method] = {name: number(value) for name, value in named.items()}
    return result | {"fits": fits}


def table(results: Sequence[dict]) -> str:
    """Format one markdown line per proxy and method."""
    lines = [
        "| proxy | parameters | comparisons | agrees with gold | method | alpha | beta | R^2 | d of the peak | "
        "best gold seen | last gold | last proxy | last d |",
        "|" + "---|" * 13,
    ]

    def shown(x: float | None) -> str:
        return "none" if x is None else f"{x:.2f}"

    for result in results:
        for method, title in (("best_of_n", "best of n"), ("rl", "RL")):
            one, rows = result["fits"][method], result[method]
            numbers = [
                *(one[name] for name in ("alpha", "beta", "r_squared", "peak_distance")), max(row["gold"] for row in rows),
                rows[-1]["gold"], rows[-1]["proxy"], max(rows[-1]["kl"], 0) ** 0.5,
            ]
            agrees = f"{100 * result['held_out_accuracy']:.0f}%"
            cells = [result["size"], f"{result['parameters']:,}", f"{result['pairs']:,}", agrees, title, *map(shown, numbers)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workdir", type=Path, default=Path("runs/quickstart"), help="a finished default run")
    parser.add_argument("--out", type=Path, default=Path("runs/overoptimization"), help="output folder")
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
    print(json.dumps(results, indent=2) if options.json else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
