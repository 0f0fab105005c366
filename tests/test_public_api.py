"""`import jaxalign as ja`: its names, and that it imports nothing before first use."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import subprocess
import sys

import pytest

import jaxalign

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.process
def test_importing_the_package_loads_neither_jax_nor_numpy():
    code = "import sys, jaxalign; dir(jaxalign); jaxalign.__version__; jaxalign.UserError; print(sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert not {"jax", "numpy", "flax", "optax"} & set(eval(found))


@pytest.mark.parametrize("name", jaxalign.__all__)
def test_every_public_name_exists_and_is_documented(name):
    found = getattr(jaxalign, name)
    if not isinstance(found, str):
        assert inspect.getdoc(found)
    assert name in dir(jaxalign)


def test_an_unknown_name_raises_an_attribute_error():
    with pytest.raises(AttributeError, match="'jaxalign' has no attribute 'PPPO'"):
        jaxalign.PPPO  # noqa: B018


@pytest.mark.parametrize("name", ["losses", "advantages"])
def test_the_namespaces_have_documented_functions(name):
    module = importlib.import_module(f"jaxalign.{name}")
    assert getattr(jaxalign, name) is module
    for function in module.__all__:
        assert inspect.getdoc(getattr(module, function)), function
