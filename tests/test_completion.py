"""`jaxalign --completion SHELL`: a shell completes commands, flags and fields of the config with the script."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from jaxalign import __main__ as program
from jaxalign import completion, plan, sample, train


def printed(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["jaxalign", "--completion", *arguments])
    assert program.main() == 0
    return capsys.readouterr().out


def completed(script, *words: str) -> list[str]:
    """What bash offers for the last word of a command line."""
    line = " ".join(f"'{word}'" for word in words)
    ask = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _jaxalign; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_flags_and_fields(monkeypatch, capsys, tmp_path):
    script = tmp_path / "jaxalign.bash"
    script.write_text(printed(monkeypatch, capsys, "bash"))
    assert completed(script, "jaxalign", "pre") == ["preview"]
    kl = ["--config.ppo.kl_coef=", "--config.ppo.kl_controller="]
    assert completed(script, "jaxalign", "train", "--config.ppo.kl_c") == kl
    assert completed(script, "jaxalign", "plan", "--top") == ["--topology="]
    assert completed(script, "jaxalign", "judge-audit", "--li") == ["--limit="]
    assert completed(script, "jaxalign", "sample", "--config") == []
    assert completed(script, "jaxalign", "--completion", "f") == ["fish"]
    assert completed(script, "jaxalign", "sample", "some") == []


@pytest.mark.parametrize("module", [train, plan, sample], ids=lambda module: module.__name__)
def test_the_flags_are_those_of_the_usage(module):
    """The first word of each line of the usage's list."""
    command = module.__name__.rpartition(".")[2]
    listed = set(re.findall(r"^  (--\w[\w-]*)", module._USAGE, re.MULTILINE))
    offered = {flag.rstrip("=") for flag in completion.flags_of(command)}
    assert len(listed) > 4 and listed - {"--config"} <= offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_scripts_have_the_same_words_and_are_well_formed(monkeypatch, capsys, tmp_path, shell):
    text = printed(monkeypatch, capsys, shell)
    assert "config.ppo.kl_coef" in text and "topology" in text and "judge-audit" in text
    if shutil.which(shell):
        (tmp_path / "script").write_text(text)
        assert subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize("arguments", [[], ["tcsh"]])
def test_an_unknown_shell_is_one_sentence(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["jaxalign", "--completion", *arguments])
    assert program.main() == 2
    assert capsys.readouterr().err == f"--completion is {''.join(arguments)!r}; it must be one of bash, zsh, fish\n"
