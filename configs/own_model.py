"""Aligns a chat model of your own with your own prompts and constitution, and itself as the judge.

    python -m jaxalign.train --config=configs/own_model.py:DIR --workdir=runs/own_model

DIR has model/ (a Hugging Face folder with a chat template), prompts/red_team.jsonl, helpful.jsonl, rl.jsonl and eval.jsonl
(rows {"prompt": text}), and constitution.json. Each path is a field that the command line can replace, such as
--config.feedback.constitution=FILE.json.

The sizes and learning rates suit a model of about a million parameters that answers in one to four sentences, such as the one
that `python -m jaxalign.world --export=DIR` writes (docs/cai.md). A larger model needs longer texts and lower learning rates.
"""

from pathlib import Path

from jaxalign.config import default_config
from jaxalign.errors import UserError

FILES = {
    "model.path": "model", "data.red_team": "prompts/red_team.jsonl", "data.helpful": "prompts/helpful.jsonl",
    "data.rl": "prompts/rl.jsonl", "data.eval": "prompts/eval.jsonl", "feedback.constitution": "constitution.json",
}


def get_config(folder=""):
    if not folder:
        raise UserError("configs/own_model.py needs a folder; give it after a colon, as in --config=configs/own_model.py:DIR")
    config = default_config()
    config.stages = ("revise", "sft", "compare", "preference", "ppo", "evaluate", "report")

    config.model.source = "huggingface"
    config.data.source = "prompts_jsonl"
    for field, name in FILES.items():
        path = Path(folder).expanduser() / name
        if not path.exists():
            raise UserError(f"{path} does not exist, but configs/own_model.py:{folder} reads it as {field}; add it, or give a "
                            "folder that has it")
        section, _, part = field.partition(".")
        config[section][part] = str(path)

    config.model.max_length = 448  # A comparison shows two answers, and its reasoning quotes both.
    config.feedback.reasoning = True

    config.revise.red_team_prompts = 512
    config.revise.helpful_prompts = 384
    config.revise.rounds = 3
    config.compare.prompts = 1280
    config.evaluate.win_rate_prompts = 64
    return config
