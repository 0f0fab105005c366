"""A finished run of the stages revise, sft, compare and preference, whose rows and weights are written without training."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax

from jaxalign.config import Config, from_config_dict, to_dict
from jaxalign.feedback.decisions import calibrate
from jaxalign.records import Comparison, Message, PrincipleLabel, Prompt
from jaxalign.registry.stages import STAGES
from jaxalign.stages.compare import summarise
from jaxalign.stages.revise import _summary as revise_summary
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import write_json
from jaxalign.stages.shared.labelled import comparison_row, revision_report
from jaxalign.stages.shared.manifest import DONE, new_manifest, stage_outputs
from jaxalign.steps.checkpoint import save_params
from jaxalign.storage import LocalStorage
from tests.folders import write_model

STAGE_NAMES = ("revise", "sft", "compare", "preference")


def dialogue(number: int) -> tuple[Message, ...]:
    """A dialogue; every third one has three turns."""
    asked = Message("user", f"Why did it sit {number} times?")
    return (asked, Message("assistant", "It is a cat."), Message("user", "Why?")) if number % 3 == 0 else (asked,)


def revision(number: int) -> dict:
    """A row of stage revise: rows 5, 15, ... were refused, and every fourth is a helpful answer without a revision."""
    row = {"prompt_id": f"p{number}", "messages": [vars(message) for message in dialogue(number)]}
    if number % 4 == 3:
        return row | {"source": "helpful", "round": 0, "principle": None, "response": f"Since it is {number}.",
                      "critique": None, "revision": None, "complete": True}
    row |= {"source": "red_team", "round": 1, "principle": "kind" if number % 2 else "brief", "response": "Go away!",
            "critique": "It is rude.", "revision": f"It is {number}.", "complete": True}
    return row | ({"outcome": "refused"} if number % 10 == 5 else {})


def comparison(number: int) -> Comparison:
    """A pair: the second answer is better in odd ones, and every tenth is undecided."""
    label = 0.2 + 0.01 * (number % 7) if number % 2 else 0.9 - 0.01 * (number % 7)
    verdict = PrincipleLabel("kind", label, label, reasoning_ab="Better | first.")
    prompt = Prompt(f"p{number}", dialogue(number), "red_team")
    pair = Comparison(prompt, f"It is {number}.", "Go away! \u00fc", label, ("kind",), label, label, principle="kind",
                      labels=(verdict,))
    undecided = {"label": 0.5, "decided": False, "outcome": "order", "principle": None}
    return dataclasses.replace(pair, **undecided) if number % 10 == 4 else pair


def write_run(folder: pathlib.Path, rows: int = 40, **changes) -> tuple[pathlib.Path, Config]:
    """Write a model and a run of it below `folder`. -> (the work directory, its config).

    changes: sections of the config, merged into those of the run.
    """
    model = folder / "base"
    if not model.exists():
        write_model(model, max_length=512)
    (folder / "red.jsonl").write_text('{"prompt": "Why?"}\n')
    sections = {
        "stages": STAGE_NAMES, "compile_cache": None, "seed": 7,
        "model": {"source": "huggingface", "path": str(model), "max_length": 512},
        "data": {"source": "prompts_jsonl", "red_team": str(folder / "red.jsonl"), "style": "chat"},
        "feedback": {"reasoning": False}, "sft": {"batch_rows": 2, "row_length": 96},
        "compare": {"max_new_tokens": 24}, "revise": {"max_new_tokens": 24},
        "preference": {"batch": 4, "max_length": 96, "held_out_share": 0.2},
    }
    sections |= {name: {**sections.get(name, {}), **value} if isinstance(value, dict) else value
                 for name, value in changes.items()}
    config, workdir = from_config_dict(sections), folder / "runs" / "tiny"
    made = {"revise": [revision(i) for i in range(rows)], "compare": [comparison_row(comparison(i)) for i in range(rows)]}
    report = revision_report(config, made["revise"]).to_dict()
    verdicts = [label for i in range(rows) for label in comparison(i).labels]
    held_out = {"pairs": 8, "accuracy": 0.75, "low": 0.409, "high": 0.929}
    summaries = {
        "revise": revise_summary(made["revise"], 1) | {"usable": report},
        "sft": {"steps": 3, "held_out_loss": 1.5, "answers": 33, "data": report},
        "compare": summarise(made["compare"], calibrate(verdicts, config.feedback)),
        "preference": {"held_out": held_out, "shift": 0.25, "scale": 1.5, "steps": 9, "train_pairs": 28},
    }
    policy = run_models.make_model(config, json.loads((model / "config.json").read_text())["vocab_size"])
    hashes, storage = {}, LocalStorage(workdir)
    for name in (name for name in config.stages if name in summaries):
        (workdir / name).mkdir(parents=True)
        write_json(workdir / name / "summary.json", summaries[name])
        if name in made:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made[name])
            (workdir / name / "rows-00000.jsonl").write_text(text, encoding="utf-8")
        if name in ("sft", "preference"):
            head = policy if name == "sft" else policy.with_head("scalar")
            save_params(workdir / name / "params", head.init(jax.random.key(len(name))))
        stage = STAGES.get(name).load("stage")
        manifest = new_manifest(stage, config, {x: hashes[x] for x in stage.inputs(config)})
        hashes[name] = manifest.output_hash
        dataclasses.replace(manifest, status=DONE, outputs=stage_outputs(storage, name)).write(storage)
    write_json(workdir / "config.json", to_dict(config))
    return workdir, config
