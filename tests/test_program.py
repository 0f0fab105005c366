"""The program `jaxalign`: commands, their exit codes, and what it imports."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from jaxalign import __main__ as program
from jaxalign import __version__

ROOT = pathlib.Path(__file__).resolve().parents[1]


def called(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["jaxalign", *arguments])
    return program.main()


def ended(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, **options)


def test_the_help_lists_every_entry_point_of_the_package(monkeypatch, capsys):
    assert called(monkeypatch, "--help") == 0
    listed = [words.group(1).replace("-", "_") for words in re.finditer(r"^  (\S+)", capsys.readouterr().out, re.MULTILINE)]
    modules = [path.stem for path in (ROOT / "jaxalign").glob("*.py") if 'if __name__ == "__main__":' in path.read_text()]
    assert sorted(listed) == sorted(name for name in modules if name != "__main__")


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    assert called(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"jaxalign {__version__}\n"


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "no command is given; `jaxalign --help` lists the commands"),
    (["trian"], "'trian' is not a command of jaxalign; did you mean train?"),
    (["judge_audit"], "'judge_audit' is not a command of jaxalign; did you mean judge-audit?"),
    (["--x"], "'--x' is not a command of jaxalign; one of init, train, plan, preview, sample, convert, export, watch, compare, "
              "judge-audit, ratings, track, doctor, world is expected"),
])
def test_a_missing_or_unknown_command_is_one_sentence(monkeypatch, capsys, arguments, message):
    assert called(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == f"{message}\n"


@pytest.mark.process
@pytest.mark.parametrize(("command", "arguments"), [
    ("train", ["--help"]), ("train", ["--zzz"]), ("plan", ["--topology=v5e:4x4", "--mfu=7"]),
    ("sample", ["--zzz"]), ("convert", ["--help"]), ("judge-audit", ["--help"]), ("doctor", ["--zzz"]), ("world", ["--zzz"]),
])
def test_a_command_does_the_same_as_its_module(command, arguments):
    through = ended("-m", "jaxalign", command, *arguments)
    direct = ended("-m", f"jaxalign.{command.replace('-', '_')}", *arguments)
    assert (through.returncode, through.stdout, through.stderr) == (direct.returncode, direct.stdout, direct.stderr)
    assert through.returncode == (0 if arguments == ["--help"] else 2) and through.stdout + through.stderr


@pytest.mark.process
def test_the_help_imports_no_command():
    code = ("import sys; from jaxalign.__main__ import main; sys.argv = ['jaxalign', '--help']; main(); "
            "print(*(name for name in sys.modules if name.startswith(('jaxalign.', 'jax.', 'numpy', 'ml_collections'))))")
    assert ended("-c", code).stdout.splitlines()[-1].split() == ["jaxalign.errors", "jaxalign.__main__"]


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_imports_of_train_ends_it_with_its_code(tmp_path, number, code):
    # The first import of train after the installation of the handlers is replaced by one that sends the signal.
    (tmp_path / "ml_collections.py").write_text(f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(60)\n")
    start = "import signal, runpy; signal.signal(signal.SIGINT, signal.default_int_handler); "
    run = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['jaxalign', 'train']; "
    result = ended("-c", start + run + "runpy.run_module('jaxalign', run_name='__main__', alter_sys=True)", timeout=50)
    assert result.returncode == code
    assert result.stderr == "interrupted; run the same command again to resume\n"
