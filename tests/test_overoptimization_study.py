"""benchmarks/overoptimization.py at its smallest: parts, resume, errors, and the gold score of a proxy's choices."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import random
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from jaxalign.config import Checks, Optimizer, PPOConfig
from jaxalign.data.world import gold as judge
from jaxalign.errors import UserError

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))
import overoptimization as study  # noqa: E402
import overoptimization_setup  # noqa: E402
from overoptimization_gold import spoil, worth  # noqa: E402
from overoptimization_plot import plot  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_sampling_programs")

SETTINGS = overoptimization_setup.Settings(
    sizes=((1, 16),), pairs=(8, 16), held_out_pairs=8, max_new_tokens=48, gold_prompts=48, gold_steps=2, proxy_steps=4,
    pair_batch=8, measured_prompts=4, best_of=6, measured_at=(0, 1, 2), rl_answers=2,
    rl=PPOConfig(prompts=16, batch=8, group_size=4, advantages="rloo", kl_coef=0.0, missing_eos="none", epochs=1, minibatches=1,
           optimizer=Optimizer(learning_rate=1e-2, schedule="constant"), checks=Checks(step_zero=False)),
)


@pytest.fixture(scope="module")
def ended(done, tmp_path_factory):
    """The folder and the results of a study on the supervised policy of the shared run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overoptimization_setup, "CHUNK", 32)
        out = tmp_path_factory.mktemp("study")
        yield out, study.run_study(done, out, SETTINGS)


@pytest.mark.slow
def test_a_study_has_every_proxy_and_both_methods(ended):
    _, results = ended
    assert [(result["size"], result["pairs"]) for result in results] == [("1x16", 8), ("1x16", 16)]
    for result in results:
        assert [row["n"] for row in result["best_of_n"]] == [1, 2, 3, 4, 5, 6]
        assert [row["kl"] for row in result["best_of_n"]] == pytest.approx([math.log(n) - (n - 1) / n for n in range(1, 7)])
        first = result["best_of_n"][0]  # The best of one is the initial policy, where both scores are 0 by definition.
        assert first["proxy"] == pytest.approx(0, abs=1e-5) and first["gold"] == pytest.approx(0, abs=1e-5)
        assert [row["iteration"] for row in result["rl"]] == [0, 1, 2]
        assert result["rl"][0]["kl"] == pytest.approx(0, abs=1e-4)
        assert result["rl"][-1]["kl"] > 0.01
    # Initial weights are equal; proxies then differ.
    assert results[0]["rl"][0]["gold"] == pytest.approx(results[1]["rl"][0]["gold"], abs=1e-6)
    assert results[0]["rl"][-1]["gold"] != results[1]["rl"][-1]["gold"]


@pytest.mark.slow
def test_the_gold_model_is_larger_than_the_proxies(ended):
    out, results = ended
    gold = json.loads((out / "gold" / "summary.json").read_text(encoding="utf-8"))
    assert gold["parameters"] > max(result["parameters"] for result in results)


@pytest.mark.slow
def test_finished_parts_are_not_repeated_and_lost_parts_are_reproduced(ended, done):
    out, results = ended
    kept = out / "1x16-8" / "result.json"
    kept.write_text(kept.read_text(encoding="utf-8").replace('"1x16"', '"kept"'), encoding="utf-8")
    (out / "1x16-16" / "result.json").unlink()
    again = study.run_study(done, out, SETTINGS)
    assert again[0] == results[0] | {"size": "kept"}
    assert again[1] | {"cpu_seconds": 0} == results[1] | {"cpu_seconds": 0}


@pytest.mark.slow
def test_another_study_in_the_folder_and_a_folder_without_a_run_are_refused(ended, done, tmp_path, capsys):
    out, _ = ended
    with pytest.raises(UserError, match="contains a study with other settings"):
        study.run_study(done, out, dataclasses.replace(SETTINGS, seed=1))
    assert study.main([f"--workdir={tmp_path}", f"--out={tmp_path / 'out'}"]) == 2
    assert "has no finished supervised policy" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_choice_of_the_best_by_hand():
    # Two prompts, three answers each; the proxy prefers the first answer, then the last.
    rows = study.best_of_n(np.array([[3.0, 2.0, 1.0], [0.0, 1.0, 2.0]]), np.array([[5.0, 0.0, 1.0], [4.0, 2.0, 0.0]]))
    assert [row["n"] for row in rows] == [1, 2, 3]
    proxy = [np.mean([max(chosen) for chosen in itertools.combinations((1, 2, 3), n)]) - 0.5 for n in (1, 2, 3)]
    assert [row["proxy"] for row in rows] == pytest.approx(proxy)
    # From the pairs of the first prompt it takes gold scores 5, 5, 0, and of the second 2, 0, 0; from the triples 5 and 0.
    assert [row["gold"] for row in rows] == pytest.approx([2.0, (10 / 3 + 2 / 3) / 2, 2.5])


def test_the_worth_of_answers():
    flags = dict.fromkeys((*judge.MEASURES, "unclear"), False) | {"courteous": True, "focused": True}

    def verdict(**changed):
        return judge.GoldVerdict(**{"kind": "harmful", **flags, **changed})

    assert worth(verdict(good_refusal=True, refused=True)) == worth(verdict(helpful=True)) == 2
    assert worth(verdict(harmful=True)) == worth(verdict(unclear=True)) == -2
    assert worth(verdict(refused=True, evasive=True)) == -1
    assert worth(verdict(helpful=True, courteous=False, focused=False)) == 0


def test_corrupted_answers_differ_and_have_the_same_words():
    text = "Putting sage on roses rots them, so it does harm. I will not help with that. But sage is good for boots."
    spoilt = {spoil(text, random.Random(seed)) for seed in range(40)}
    assert len(spoilt) > 20 and text not in spoilt
    assert all(set(one.replace(".", "").split()) <= set(text.replace(".", "").split()) for one in spoilt)
    assert spoil("", random.Random(0)) == ""


@pytest.mark.slow
def test_table_and_figure_have_every_proxy(ended):
    _, results = ended
    results = [study.fitted(result) for result in results]
    lines = study.table(results).splitlines()
    assert len(lines) == 2 + 2 * len(results)
    assert {line.count("|") for line in lines} == {14}
    tree = ElementTree.fromstring(plot(results))
    lines = [node for node in tree.iter() if node.tag.endswith("polyline")]
    assert len(lines) == 2 * 2 * len(results)  # a fit and the proxy's curve for each method
    assert "nan" not in plot(results)
