"""Built-in records are declared above their functions, and read without importing them."""

import dataclasses
import importlib
import subprocess
import sys

import pytest

from jaxalign.registries import ADVANTAGES, JUDGES, OBJECTIVES, POLICY_LOSSES, REWARDS, STAGES
from jaxalign.registry.declarations import declared

DECLARED = {
    "advantage estimator": (ADVANTAGES, ("gae", "reinforce", "vtrace", "rloo", "grpo", "reinforce_pp", "remax")),
    "policy loss": (POLICY_LOSSES, ("clip", "gspo", "cispo", "plain")),
    "objective": (OBJECTIVES, (
        "sigmoid", "conservative", "robust", "hinge", "ipo", "ipo_mean", "exo_pair", "nca_pair", "bco_pair", "apo_zero",
        "apo_down", "sppo_hard", "aot", "aot_unpaired", "discopop", "kto", "orpo", "cpo", "simpo",
    )),
    "reward source": (REWARDS, ("preference", "distilled", "model", "callable", "verifier", "ai_feedback")),
    "judge": (JUDGES, ("local", "model", "endpoint")),
    "stage": (STAGES, (
        "pretrain", "revise", "sft", "compare", "preference", "reward_distill", "best_of_n", "dpo", "online_dpo", "ppo",
        "evaluate", "report",
    )),
}


@pytest.mark.parametrize(("registry", "names"), DECLARED.values(), ids=DECLARED)
def test_messages_and_documentation_list_the_names_in_this_order(registry, names):
    assert tuple(registry.builtin) == names


@pytest.mark.parametrize("registry", [registry for registry, _ in DECLARED.values()], ids=DECLARED)
def test_every_declared_function_exists(registry):
    for record in registry.builtin.values():
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if isinstance(value, str) and ":" in value:
                module, _, name = value.partition(":")
                assert callable(getattr(importlib.import_module(module), name))


def test_the_arguments_of_a_declaration_are_the_fields_of_the_record():
    kto = OBJECTIVES.get("kto")
    assert kto.function == "jaxalign.steps.objectives:kto"
    assert kto.anchor == "jaxalign.steps.objectives:mismatched_kl"
    assert (kto.pairs, kto.summable, kto.reads) == (False, False, ("desirable_weight", "undesirable_weight"))


def test_records_are_read_without_jax():
    code = ("import sys\nfrom jaxalign.registries import *\n"
            "records = [*ADVANTAGES, *POLICY_LOSSES, *OBJECTIVES, *REWARDS, *JUDGES, *STAGES]\n"
            "assert len(records) == 51 and 'jax' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_module_that_the_registry_does_not_list_cannot_declare():
    with pytest.raises(ValueError, match="declares the objective 'mine', but its registry does not list the module"):
        OBJECTIVES.declare("mine")(lambda inputs: inputs.first)


def test_an_unknown_field_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "wrong_declaration.py").write_text("@OBJECTIVES.declare('mine', pears=True)\ndef mine(inputs): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TypeError, match="pears"):
        list(declared(OBJECTIVES.record, ["wrong_declaration"]))
