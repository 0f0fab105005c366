"""Writes the files of `jaxalign init`: the config, example prompts and a constitution to edit."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from importlib import resources
from pathlib import Path

from jaxalign.errors import UserError
from jaxalign.feedback.constitution import load_constitution
from jaxalign.starter.facts import BASE, KINDS, MARKED, ModelFacts
from jaxalign.starter.settings import STAGES, InFolder, Setting, SettingBlock, StarterChoice, blocks, own_judge, rehearsal

PROMPTS = ("red_team.jsonl", "helpful.jsonl")
CONSTITUTION = "constitution.json"
CONFIG = "config.py"

_TEXT = '''"""Constitutional AI on {name},
{kind}.

    jaxalign train --config={place} --workdir={workdir}

Written by `jaxalign init`. Every other field has its default: `jaxalign train --help` lists them, and
docs/cai_your_model.md says what to look at and what to change.
"""

from pathlib import Path

from jaxalign.config import default_config

HERE = Path(__file__).resolve().parent
JUDGE = ""  # Another judge: the URL of an OpenAI-compatible server, such as http://localhost:8000/v1, or a model's folder.


def get_config():
    config = default_config()
    config.stages = {stages}

{body}

    # The judge, which criticises, revises and compares.
    if JUDGE.startswith("http"):
        config.feedback.judge, config.endpoint.url = "endpoint", (JUDGE,)
    elif JUDGE:
        config.feedback.judge, config.judge.path = "model", (JUDGE,)
{judge}
    return config
'''


def check_new(folder: Path) -> None:
    """Raises UserError unless the folder is new or empty and can be created."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give the name of a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} already has files; give the name of a new folder, or remove it first")
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "cannot be written" if existing.is_dir() else "is not a folder"
        raise UserError(f"{folder} cannot be created, because {existing} {reason}; give another folder")


def write_examples(folder: Path, facts: ModelFacts) -> None:
    """Writes the example prompts and the constitution into an existing folder.

    The constitution of a base model also has the examples of critiques and revisions that the judge sees before a request. That
    of a model with jaxalign's markers has the principles that it knows.
    """
    examples = resources.files("jaxalign.starter") / "examples"
    for name in PROMPTS:
        (folder / name).write_text((examples / name).read_text("utf-8"), encoding="utf-8")
    if facts.kind == MARKED:
        principles = [dataclasses.asdict(principle) for principle in load_constitution("default")]
        content = {"name": "mine", "principles": principles}
    else:
        content = json.loads((examples / CONSTITUTION).read_text("utf-8"))
    if facts.kind == BASE:
        exemplars = resources.files("jaxalign.feedback") / "templates" / "transcript" / "exemplars.json"
        content["system_chat"] = json.loads(exemplars.read_text("utf-8"))["system_chat"]
    (folder / CONSTITUTION).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_config(folder: Path, facts: ModelFacts, choice: StarterChoice, place: Path) -> None:
    """Writes config.py.

    Args:
      folder: an existing folder.
      facts, choice: the model and what the checks decided.
      place: the folder's final name, for the command in the file.
    """
    judge, lifted = own_judge(facts, choice), rehearsal(choice)
    lines = [_block(part, 8) for part in (judge, lifted) if part and part.settings]
    text = _TEXT.format(
        name=_plain(facts.folder.name), kind=KINDS[facts.kind], place=_plain(shlex.quote(str(place / CONFIG))),
        workdir=_plain(shlex.quote(str(place / "run"))), stages=_shown(STAGES),
        body="\n\n".join(_block(block, 4) for block in blocks(facts, choice)),
        judge="    else:\n" + "\n".join(lines) if lines else "",
    )
    (folder / CONFIG).write_text(text, encoding="utf-8")


def _plain(text: str) -> str:
    """A text as it can stand in a docstring."""
    return text.replace("\\", "/").replace('"', "'")


def _block(block: SettingBlock, indent: int) -> str:
    return "\n".join(" " * indent + line for line in (f"# {block.title}", *map(_line, block.settings)))


def _line(setting: Setting) -> str:
    comment = f"  # {setting.why}" if setting.why else ""
    return f"config.{setting.field} = {_shown(setting.value)}{comment}"


def _shown(value: object) -> str:
    if isinstance(value, InFolder):
        return f'str(HERE / "{value}")'
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))}{',' * (len(value) == 1)})"
    return json.dumps(value) if isinstance(value, str) else repr(value)
