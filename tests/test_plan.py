"""The command `python -m jaxalign.plan`: flags, exit codes, the table and the JSON object."""

from __future__ import annotations

import json

import pytest

from jaxalign.plan import main

RUN = ("--config=configs/real_size.py:llama31_8b_v5e16", "--shape=Llama-3.1-8B", "--config.mesh.fsdp=16",
       "--config.mesh.tensor=1", "--config.sft.batch_rows=16", "--config.preference.micro_batch_tokens=1536")


def plan(*arguments: str) -> int:
    return main(["plan", *arguments])


@pytest.mark.slow
def test_a_run_that_does_not_fit_exits_with_1_and_advice(capsys):
    assert plan(*RUN, "--topology=v5e:4x4") == 1
    printed = capsys.readouterr().out
    assert "Llama-3.1-8B on v5e:4x4: 16 devices on 2 hosts" in printed and "mesh: fsdp=16" in printed
    assert "It does not fit: ppo generate needs" in printed and "config.mesh: " in printed and "--examples=N" in printed


def test_search_plans_a_mesh_that_fits(capsys):
    assert plan(*RUN, "--topology=v5e:4x4", "--search", "--prices=configs/prices_example.json") == 0
    printed = capsys.readouterr().out
    assert "It fits: " in printed and "USD, at 1 per device hour on 2026-01-01" in printed


def test_json_has_every_number_of_the_table(capsys):
    assert plan(*RUN, "--topology=v5e:4x4", "--config.mesh.generation=training", "--examples=1000", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {"cluster", "mesh", "assumptions", "weights", "tasks", "fits", "peak_bytes", "seconds", "uncounted", "money",
            "advice", "faster_mesh", "requests", "compiled", "micro_batches", "keep_gathered", "placements", "placed",
            "kinds", "less_recomputation"} == set(found)
    assert found["fits"] is True and found["uncounted"] == [] and found["requests"] == [] and found["mesh"]["fsdp"] == 16
    assert set(found["weights"]) == {"policy", "preference model", "critic", "reference"}
    for task in found["tasks"]:
        parts = [*task["resident_bytes"].values(), *task["temporary_bytes"].values()]
        assert task["peak_bytes"] == pytest.approx(sum(parts))
        assert task["seconds"] > 0 and task["flops"] > 0 and task["bound"] in ("compute", "memory", "network")


@pytest.mark.medium
def test_a_run_that_could_recompute_less_is_told_so(capsys):
    own = ("--config=configs/real_size.py:llama31_8b_h100x8", "--shape=Llama-3.1-8B", "--topology=h100:1x8", "--prompt=512")
    assert plan(*own, "--config.model.remat_saves=nothing") == 0
    assert "Less recomputation fits too: config.model.remat_saves=products (" in capsys.readouterr().out
    found = {}
    for saves in ("nothing", "products"):
        assert plan(*own, f"--config.model.remat_saves={saves}", "--json") == 0
        found[saves] = json.loads(capsys.readouterr().out)
    change = found["nothing"]["less_recomputation"]
    assert change == {"change": "config.model.remat_saves=products", "peak_bytes": found["products"]["peak_bytes"],
                      "seconds": found["products"]["seconds"]}
    assert change["seconds"] < 0.95 * found["nothing"]["seconds"]
    # Without remat the run does not fit, and an update that the network limits gains nothing.
    assert found["products"]["less_recomputation"] is None
    limited = ("--config=configs/real_size.py:llama31_8b_v6e64", "--shape=Llama-3.1-8B", "--topology=v6e:8x8", "--prompt=512")
    assert plan(*limited, "--config.mesh.fsdp=64", "--config.mesh.tensor=1", "--config.preference.batch=64") == 0
    assert "Less recomputation" not in capsys.readouterr().out
    roomy = ("--config=configs/real_size.py:llama32_1b", "--shape=Llama-3.2-1B", "--topology=v5p:2x2x1", "--prompt=512")
    assert plan(*roomy, "--config.mesh.data=4") == 0
    assert "Less recomputation fits too: config.model.remat=False (" in capsys.readouterr().out
    assert plan(*roomy, "--config.mesh.data=4", "--config.model.remat=False") == 0
    assert "Less recomputation" not in capsys.readouterr().out


def test_kernels_add_to_the_time_of_sampling_on_gpus_only(capsys):
    """16 layers of 19 kernels, and 3 for each of 7 adapters, of 1.9 us, for each of 255 tokens after the first."""
    own = ("--config=configs/real_size.py:llama32_1b", "--shape=Llama-3.2-1B", "--prompt=512", "--json")
    found = {}
    for topology in ("h200:1x1", "v5e:1x1"):
        assert plan(*own, f"--topology={topology}") == 0
        tasks = json.loads(capsys.readouterr().out)["tasks"]
        found[topology] = next(task for task in tasks if (task["stage"], task["phase"]) == ("ppo", "generate"))
        assert {task["launch_seconds"] for task in tasks if task["phase"] != "generate"} == {0}
    gpu, tpu = found.values()
    # 16 layers of 60,821,504 parameters in bfloat16, and 44,032 * 16 adapter parameters in float32.
    assert gpu["temporary_bytes"]["copied layers"] == 16 * (60821504 * 2 + 44032 * 16 * 4)
    assert gpu["launch_seconds"] == pytest.approx(255 * 16 * (19 + 3 * 7) * 1.9e-6) and tpu["launch_seconds"] == 0
    assert gpu["seconds"] - gpu["launch_seconds"] >= gpu["memory_seconds"] and gpu["bound"] == "launch"
    assert tpu["seconds"] < tpu["memory_seconds"] + tpu["compute_seconds"]
    assert plan(*own[:-1], "--topology=h200:1x1") == 0
    assert " network  launch " in capsys.readouterr().out


def test_requests_to_a_server_and_their_price(capsys):
    own = ("--config=configs/quickstart.py", "--gpus=L4x1", "--config.feedback.judge=endpoint", "--config.compare.prompts=1000",
           "--config.endpoint.url=http://localhost:8000/v1", "--config.endpoint.output_price=1000.0",
           "--config.feedback.principles_per_comparison=2", "--config.stages=('pretrain', 'compare')")
    assert plan(*own) == 0
    printed = capsys.readouterr().out
    # 1000 pairs, 2 orders, 2 principles; 8 tokens for each verdict.
    assert "compare     4,000              ?            32,000      ?" in printed
    assert "each verdict takes config.endpoint.votes=8 requests" in printed and "Set --prompt=N" in printed
    assert plan(*own, "--prompt=20", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["requests"]
    assert found["price"] == pytest.approx(32.0)  # Prompt tokens cost nothing.


def test_gpus_and_a_model_from_scratch(capsys):
    assert plan("--config=configs/real_size.py:llama31_8b_h100x8", RUN[1], "--gpus=H100x8") == 0
    assert plan("--config=configs/real_size.py:llama31_8b_h100x8", RUN[1], "--topology=h100:1x8") == 0
    assert plan("--config=configs/quickstart.py", "--gpus=L4x1") == 0
    assert "pretrain update" in capsys.readouterr().out


def test_a_small_model_has_figures_in_smaller_units(capsys):
    small = [f"--config.model.{name}" for name in ("layers=1", "embed=16", "mlp=32", "heads=2", "kv_heads=2", "head_dim=8")]
    own = ("--config=configs/quickstart.py", "--config.stages=pretrain", "--config.mesh.fsdp=4", "--gpus=H100x4")
    assert plan(*own, *small) == 0
    printed = capsys.readouterr().out
    assert "B on each device, 78.3 GB usable" in printed and "GB over fsdp" not in printed and " 0.0 " not in printed
    parameters = next(line for line in printed.splitlines() if line.startswith("policy")).split()[1]
    assert parameters[-1] == "K" and 1 < float(parameters[:-1]) < 100


@pytest.mark.medium
def test_files_of_prompts_may_be_unset_or_partly_set(capsys):
    own = ("--config=configs/quickstart.py", "--config.data.source=prompts_jsonl", "--config.data.style=hh", "--gpus=L4x1",
           "--config.reward.source=callable", "--config.reward.callable=mine.py:score", RUN[1])
    stages = "--config.stages=('ppo', 'evaluate')"
    for files in ((), ("--config.data.rl=q.jsonl",), ("--config.data.train=q.jsonl",)):
        assert plan(*own, stages, *files) in (0, 1)
        assert "on L4x1" in capsys.readouterr().out


@pytest.mark.medium
def test_a_shape_replaces_the_sizes_of_the_config(capsys):
    """configs/direct_rlaif.py sets the pretraining text, which a checkpoint does not need."""
    sized = ("--config=configs/direct_rlaif.py", "--config.model.layers=2", "--config.mesh.fsdp=8", "--topology=v6e:2x4")
    stages = ("--config.stages=('revise', 'sft', 'ppo')", "--config.sft.batch_rows=8")
    plan(*sized, *stages, RUN[1])
    assert "Llama-3.1-8B on v6e:2x4" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "sentence"), [
    ((), "exactly one of --topology"),
    (("--topology=v5e:4x4", "--gpus=H100x8"), "exactly one of --topology"),
    (("--topology=v5x:4x4",), "'v5x' is not one of the known TPU generations"),
    (("--topology=v5e:4x4", "--shape=Llama-9"), "shape is 'Llama-9'; it must be one of"),
    (("--topology=v5e:4x4", "--mfu=2"), "--mfu is '2'; a share above 0 and at most 1"),
    (("--topology=v5e:4x4", "--prompt=0"), "--prompt is '0'; a number of at least 1"),
    (("--topology=v5e:4x4", "--prompt=5000"), "prompts of 5000 tokens and responses of 256 exceed config.model.max_length"),
    (("--topology=v5e:4x4", "--prices=nowhere.json"), "--prices=nowhere.json cannot be read"),
    (("--topology=v5e:4x4", "--config.mesh.fsdpp=2"), "did you mean fsdp?"),
    (("--topology=v5e:2x2",), "asks for 16 devices, but v5e:2x2 has 4"),
    (("--topology=v5e:4x4", "--serach"), "--serach is not a flag"),
    (("--gpus=H100x16", "--compile"), "--compile needs a --topology, as in v5e:4x4 or"),
])
def test_mistakes_exit_with_2_and_one_sentence(capsys, arguments, sentence):
    given = [argument for argument in arguments if argument.startswith("--shape")] or [RUN[1]]
    assert plan(RUN[0], *RUN[2:], *given, *[a for a in arguments if not a.startswith("--shape")]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_help(capsys):
    assert plan("--help") == 0
    assert "--topology=NAME" in capsys.readouterr().out
