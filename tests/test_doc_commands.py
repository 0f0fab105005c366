"""Every command of jaxalign on a page has valid flags, and those marked `<!-- run -->` run."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from jaxalign import __main__ as program
from jaxalign import (
    compare,
    convert,
    doctor,
    export,
    init,
    judge_audit,
    plan,
    preview,
    ratings,
    sample,
    track,
    train,
    watch,
    world,
)
from jaxalign.completion import SHELLS, fields
from jaxalign.parallel.distributed import take_flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md", *(ROOT / "docs").rglob("*.md")])
COMMAND = re.compile(r"^ {4}(?:\w+=\S+ )*(?:python3? -m jaxalign\.|jaxalign )([\w-]+)(.*)$", re.MULTILINE)
MARKED = re.compile(r"^<!-- run -->\n\n?((?: {4}.*\n)+)", re.MULTILINE)
_ENDS = ("|", ">", "&&", "&", "2>&1")
PLACEHOLDER = re.compile(r"\b(FOLDER|FILE|DIR|WORKDIR|RUN|OUT|SHARED|NAME|STAGE|PATH|MODEL|DATA|HOST)\b")


def text_of(page: pathlib.Path) -> str:
    return re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))


def commands(page: pathlib.Path) -> list[tuple[str, list[str]]]:
    """The name and the arguments of every command on a page; pipes and redirections are left out."""
    found = []
    for name, rest in COMMAND.findall(text_of(page)):
        words = shlex.split(rest, comments=True)
        end = next((place for place, word in enumerate(words) if word in _ENDS or word.startswith("(")), len(words))
        # [--flag] is an optional flag.
        words = [word.strip("[]") if word.startswith("[--") else word for word in words[:end] if word != "..."]
        found.append((name.replace("_", "-"), words))
    return found


def parse(name: str, arguments: list[str]) -> None:
    """Parse as the command does. The reader replaces words such as FOLDER; of such configs only the names are checked."""
    if name == "train":
        config_flags(take_flags(arguments)[1], {"--config", "--workdir", "--overwrite", "--dry-run", "--help"})
    elif name == "plan":
        own, rest = plan._take_own(arguments)
        config_flags(rest, {"--config"})
        if not PLACEHOLDER.search(" ".join(arguments)):
            plan.read_config(["plan", *rest], own["shape"])
    elif name == "preview":
        config_flags(preview._take_own(arguments)[1], {"--config", "--workdir"})
    elif name == "judge-audit":
        config_flags(judge_audit._take_own(arguments)[1], {"--config", "--workdir"})
    elif name in ("sample", "convert"):
        {"sample": sample, "convert": convert}[name]._read_arguments([name, *take_flags(arguments)[1]])
    elif name == "export":
        export._read_arguments([name, *arguments])
    elif name == "world":
        world._read_arguments([name, *arguments])
    elif name in ("watch", "compare", "ratings"):
        {"watch": watch, "compare": compare, "ratings": ratings}[name]._read(arguments)
    elif name == "track":
        track._parse(arguments)
    elif name in ("doctor", "init"):
        {"doctor": doctor, "init": init}[name].read_arguments([name, *arguments])
    elif name == "--completion":
        assert arguments[0] in SHELLS
    elif name != "config":  # `python -m jaxalign.config` has no arguments.
        assert name in ("--help", "--version"), f"{name} is not a command"


def config_flags(arguments: list[str], known: set[str]) -> None:
    names = {f"--config.{name}" for name in fields()} | known
    for argument in arguments:
        flag = argument.partition("=")[0]
        # A field without =VALUE is a switch, as in --config.model.remat; a variable or a placeholder stands for further flags.
        assert flag in names or not flag.startswith("--"), f"{argument} is not a flag"


@pytest.mark.parametrize("page", [page for page in PAGES if COMMAND.search(text_of(page))],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_parsed(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, arguments in commands(page):
        parse(name, arguments)


def test_the_pages_show_every_command():
    shown = {name for page in PAGES for name, _ in commands(page)}
    assert set(program._COMMANDS) <= shown


def test_a_wrong_flag_is_found():
    with pytest.raises(AssertionError, match="--config.ppo.kl_coeff=1 is not a flag"):
        parse("train", ["--config.ppo.kl_coeff=1"])
    with pytest.raises(train.UserError):
        parse("sample", ["--modell=x"])


def marked() -> list[str]:
    return [command for page in PAGES for block in MARKED.findall(page.read_text(encoding="utf-8"))
            for command in re.sub(r"\\\n\s*", "", block).splitlines()]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("command", marked())
def test_a_marked_command_runs(command, tmp_path):
    """In a shell, with the program of this checkout, and with the repository's configs."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "jaxalign").write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m jaxalign \"$@\"\n")
    (tmp_path / "jaxalign").chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "",
                                "PATH": f"{tmp_path}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_marked_commands():
    assert len(marked()) >= 4
