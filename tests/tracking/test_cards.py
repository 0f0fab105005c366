"""The card of a model states the facts in the files of its run, and nothing that is not there."""

from __future__ import annotations

import json

import pytest

from jaxalign.tracking.cards.facts import public_name, read_facts
from jaxalign.tracking.cards.model import base_licence, model_card


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


@pytest.fixture
def run(tmp_path):
    """The files of a run whose policy of stage ppo was evaluated."""
    config = {"model": {"source": "huggingface", "path": str(tmp_path / "hub" / "Tiny-1B")}, "seed": 3}
    judged = config | {"feedback.constitution": "/home/me/rules|v2.json", "feedback.judge": "endpoint",
                       "endpoint.model": "org/judge-70b"}
    stages = {"compare": (judged, {}), "ppo": (config, {"compare": "hash-of-compare"}),
              "evaluate": (config, {"ppo": "hash-of-ppo"})}
    for name, (fields, inputs) in stages.items():
        write(tmp_path / "run" / name / "manifest.json", {
            "stage": name, "status": "done", "config": fields, "inputs": inputs, "config_hash": f"config-of-{name}",
            "files": {"/home/me/rules|v2.json": "hash-of-rules"} if name == "compare" else {},
            "output_hash": f"hash-of-{name}"})
    rate = {"count": 60, "total": 80, "rate": 0.75, "low": 0.645, "high": 0.832}
    win = {"model": "ppo", "against": "base", "wins": 9, "total": 12, "rate": 0.75, "low": 0.468, "high": 0.911}
    write(tmp_path / "run" / "evaluate" / "summary.json", {
        "rates": {"ppo": {"harmless": rate}, "base": {"harmless": rate | {"rate": 0.111}}},
        "win_rates": [win, win | {"model": "sft", "against": "other"}], "kl": {"ppo": 4.25}, "length": {"ppo": 31.5}})
    write(tmp_path / "run" / "config.json", {"stages": ["compare", "ppo", "evaluate"]})
    return tmp_path / "run"


def test_a_policy_has_its_results_with_intervals_and_hashes(run):
    card = model_card(read_facts(run), "ppo", "policy")
    for line in ("| rate of harmless | 75.0% | 64.5 to 83.2% | 80 |", "| win rate against base | 75.0% | 46.8 to 91.1% | 12 |",
                 "| KL divergence in nats per answer | 4.25 | - | - |", "| Seed | 3 |", "| Base model | Tiny-1B |",
                 "| Constitution of compare | rules\\|v2.json |", "| Judge of compare | endpoint (org/judge-70b) |",
                 "| rules\\|v2.json | content | hash-of-rules |", "| stage compare | output | hash-of-compare |"):
        assert line in card.splitlines(), line
    assert "11.1%" not in card and "other" not in card and "/home" not in card


def test_results_of_other_weights_are_not_stated(run):
    manifest = json.loads((run / "evaluate" / "manifest.json").read_text())
    write(run / "evaluate" / "manifest.json", manifest | {"inputs": {"ppo": "hash-of-older-weights"}})
    card = model_card(read_facts(run), "ppo", "policy")
    assert "75.0%" not in card and "- The run has not evaluated this model." in card


def test_the_audit_is_stated_only_if_there_is_one(run):
    assert "The run has no audit of the judge" in model_card(read_facts(run), "ppo", "policy")
    write(run / "judge_audit.json", {})
    assert "The run has an audit of the judge" in model_card(read_facts(run), "ppo", "policy")


@pytest.mark.parametrize(("text", "licence"), [
    ("---\nlanguage: en\nlicense: apache-2.0\n---\n# Tiny\n", "apache-2.0"),
    ('---\nlicense: "llama3.1"\n---\n', "llama3.1"),
    ("# Tiny\n\nlicense: mit\n", None),
    ("---\nlanguage: en\n---\nlicense: mit\n", None),
])
def test_the_licence_is_the_one_in_the_front_matter_of_the_base(run, tmp_path, text, licence):
    base = tmp_path / "hub" / "Tiny-1B"
    write(base / "README.md", text)
    assert base_licence(base) == licence
    card = model_card(read_facts(run), "ppo", "policy", base=base)
    assert f"| Licence of the base model | {licence or 'not stated in its folder'} |" in card
    assert (f'license: "{licence}"' in card) == (licence is not None)


def test_adapters_are_loaded_with_peft(run):
    card = model_card(read_facts(run), "ppo", "policy", adapters=True)
    assert 'library_name: "peft"' in card and "AutoPeftModelForCausalLM" in card


def test_names_on_a_card_have_no_folders_and_no_keys():
    assert public_name("~/models/base/") == "base"
    assert public_name("C:\\models\\base") == "base"
    assert public_name("judges.py:Mine") == "judges.py:Mine"
    assert "sk-abcdefghijklmnopqrstuv" not in public_name("sk-abcdefghijklmnopqrstuv")
