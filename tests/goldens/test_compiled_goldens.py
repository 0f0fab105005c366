"""The programs of PPO, DPO, SFT, the preference model and sampling, compiled for TPUs and GPUs, against a record.

The record (`compiled_goldens.json`) was written by `python -m tests.goldens.record`. Some properties do not depend on it: fused
attention, donated memory, no float32 copy of bfloat16 weights, and no logits of all tokens.
"""

from __future__ import annotations

import os
import pathlib
import warnings

import pytest

from tests.goldens.compiled_runs import MESHES, RUNS, compiled_facts, faults, missing, platform, read_record, versions

pytestmark = pytest.mark.slow
# One program for 64 devices, and for TPUs one of the two updates of all weights, so that the tests take less than 5 minutes on
# 2 cores. `python -m tests.goldens.record --check` compares all programs.
CASES = [
    *(("h100:1x8", run, RUNS[run].programs) for run in RUNS),
    *(("v5e:4x4", run, RUNS[run].programs) for run in ("ppo", "dpo")),
    ("v5e:4x4", "supervised", ("preference update",)),
    ("h100:8x8", "ppo", ("ppo update",)),
    ("v5p:4x4x4", "ppo", ("ppo scoring",)),
]


@pytest.fixture(scope="module")
def reports() -> pathlib.Path:
    """A folder of the compilers' reports that outlives the run, so that only changed programs compile again."""
    return pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "plans"


def test_every_topology_has_a_case():
    assert {topology for topology, *_ in CASES} == set(MESHES)


@pytest.mark.parametrize(("topology", "run", "programs"), CASES, ids=[f"{topology}-{run}" for topology, run, _ in CASES])
def test_programs_are_as_recorded(topology, run, programs, reports):
    if missing(topology):
        pytest.skip(missing(topology))
    record = read_record()
    same = record["versions"][platform(topology)] == versions(topology)
    if not same:
        warnings.warn(f"{topology}: the record is of other compiler versions; its figures are not compared", stacklevel=1)
    recorded = record["programs"][topology]
    facts = compiled_facts(run, topology, reports=reports, programs=programs)
    assert set(facts) == set(programs) <= set(recorded)
    assert [fault for name in facts for fault in faults(name, topology, facts[name], recorded[name] if same else {})] == []


@pytest.mark.parametrize("topology", ["h100:1x8", "h100:8x8"])
def test_most_gathered_bytes_of_a_large_model_arrive_during_computation(topology, reports):
    """The compiler merges the gathers of a layer of the small shape into one, which nothing can overlap."""
    if missing(topology):
        pytest.skip(missing(topology))
    facts = compiled_facts("supervised", topology, reports=reports, shape="Llama-3.1-8B")
    assert {name: one.overlapped for name, one in facts.items() if one.overlapped < 0.8} == {}


@pytest.mark.parametrize(("run", "program", "flag", "lost"), [
    ("supervised", "sft update", "model.attention=plain", "does not call cuDNN attention"),
    ("dpo", "dpo update", "model.compute_dtype=float32", "in float32"),
])
def test_a_loss_is_named(run, program, flag, lost, reports):
    """Attention by the plain kernel, and a float32 cast of bfloat16 weights."""
    if missing("h100:1x8"):
        pytest.skip(missing("h100:1x8"))
    (facts,) = compiled_facts(run, "h100:1x8", flag, reports=reports, programs=(program,)).values()
    found = faults(program, "h100:1x8", facts, read_record()["programs"]["h100:1x8"][program])
    assert any(fault.startswith(program) and lost in fault for fault in found), found
