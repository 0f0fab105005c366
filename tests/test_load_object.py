"""Objects that a config names as "package.module:name" or "FILE.py:name"."""

from __future__ import annotations

import fractions
import sys

import pytest

from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.registry.core import load_object
from jaxalign.stages.shared.rewards import make_callable

WHERE = "config.reward.callable"


def test_objects_are_found_in_modules_and_files(tmp_path, monkeypatch):
    assert load_object("fractions:Fraction.from_float", WHERE) == fractions.Fraction.from_float
    file = tmp_path / "mine.py"
    file.write_text("import dataclasses\n@dataclasses.dataclass\nclass Scale:\n    by: float = 2.0\n")
    assert load_object(f"{file}:Scale", WHERE)().by == 2.0
    monkeypatch.chdir(tmp_path)
    assert load_object("mine.py:Scale", WHERE) is load_object(f"{file}:Scale", WHERE)


def test_a_file_is_run_again_only_if_its_text_has_changed(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("VALUES = []\n")
    load_object(f"{file}:VALUES", WHERE).append(1)
    assert load_object(f"{file}:VALUES", WHERE) == [1]
    file.write_text("VALUES = [2]\n")
    assert load_object(f"{file}:VALUES", WHERE) == [2]


@pytest.mark.parametrize(("spec", "message"), [
    ("number_match", "config.reward.callable is 'number_match'; 'package.module:name' or 'FILE.py:name' is expected"),
    ("jaxalign.rewards.verifiers:", "'package.module:name' or 'FILE.py:name' is expected"),
    ("no_such_package.rewards:f", r"No module named 'no_such_package'\); install it, put its folder on PYTHONPATH, or"),
    ("jaxalign.nowhere:f", r"No module named 'jaxalign.nowhere'\); install it"),
    ("jaxalign.rewards.verifiers:number_mach", "has no number_mach; did you mean number_match"),
    ("no/such/file.py:f", "config.reward.callable is 'no/such/file.py:f': there is no file /.*/no/such/file.py"),
])
def test_a_name_without_an_object_is_refused(spec, message):
    with pytest.raises(UserError, match=message):
        load_object(spec, WHERE)


@pytest.mark.parametrize(("source", "message"), [
    ("import no_such_dependency", r"cannot be imported \(ModuleNotFoundError: No module named 'no_such_dependency'\)$"),
    ("1 / 0", r"cannot be imported \(ZeroDivisionError"),
    ("def f(:", r"cannot be imported \(SyntaxError"),
    ("import sys; sys.exit(2)", r"cannot be imported \(SystemExit: 2\)"),
])
def test_a_module_that_cannot_be_imported_is_reported_in_one_sentence(tmp_path, monkeypatch, source, message):
    (tmp_path / "broken_part.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for spec in (f"{tmp_path / 'broken_part.py'}:f", "broken_part:f"):
        with pytest.raises(UserError, match=message):
            load_object(spec, WHERE)
    assert not [name for name in sys.modules if "broken_part" in name]


def test_a_reward_that_is_not_a_function_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("f = 3\n")
    config = from_config_dict({"reward": {"source": "callable", "callable": f"{tmp_path / 'mine.py'}:f"}})
    inputs = type("Inputs", (), {"config": config})
    with pytest.raises(UserError, match=r"config.reward.callable is '.*mine.py:f', of type int; a function"):
        make_callable(inputs)
