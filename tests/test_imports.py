"""Import rules: layers, access to the gold judge, and no second deep-learning framework."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

import grimp
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "jaxalign").rglob("*.py"))
GOLD = "jaxalign.data.world.gold"
EVALUATION = {"jaxalign.stages.evaluate", "jaxalign.data.world.label_scores", "jaxalign.data.world.scores", "jaxalign.world"}
EXTRAS = {"endpoint": "endpoint", "data": "data/sources/arrow_parts.py stages/shared/exported_sets.py",
          "eval": "trainers/harness.py trainers/harness_model.py", "tfds": "data/sources/tfds_part.py",
          "track": "tracking/sinks", "prometheus": "tracking/watching/exporter.py"}
"""The files or folders that import the packages of each extra."""
FOREIGN = {"tensorflow", "tf_keras", "keras", "torch", "transformers"}


def module_name(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """The import graph read from the source; imports inside functions count as well."""
    sys.path.insert(0, str(ROOT))
    try:
        return grimp.build_graph("jaxalign", cache_dir=None)
    finally:
        sys.path.remove(str(ROOT))


def test_only_evaluation_reaches_the_gold_judge_by_any_chain_of_imports(graph):
    assert graph.find_downstream_modules(GOLD) == EVALUATION


@pytest.mark.medium
def test_no_dynamic_import_reaches_the_gold_judge():
    """Only these places import by a name computed at run time, and no string in the package names the gold judge."""
    dynamic = {}
    named = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)
                 and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")]
        if calls:
            dynamic[module_name(path)] = calls
        named |= {module_name(path) for node in ast.walk(tree)
                  if isinstance(node, ast.Constant) and isinstance(node.value, str) and GOLD in node.value}
    places = {
        "jaxalign": ["importlib.import_module(place)"],  # a public name, from the table in this module
        "jaxalign.registry.core": ["importlib.import_module(place)"],  # "module:attribute" of a registered record
    }
    assert dynamic == places
    assert named == set()


LARGE = {"orbax.checkpoint", "jax.experimental.pallas"}
"""Modules that take 29 MB together. Only checkpoints and fused attention on TPUs need them."""


def run_python(code: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_all_other_modules_load_without_the_gold_judge_and_other_frameworks():
    """Checked at run time, including modules that the libraries import."""
    code = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""
    names = [module_name(path) for path in SOURCES]
    loaded = set(json.loads(run_python(code, *(name for name in names if name != GOLD and name not in EVALUATION))))
    assert GOLD not in loaded
    assert not loaded & FOREIGN
    assert not loaded & LARGE


def imported_packages(paths: Iterable[pathlib.Path]) -> set[str]:
    imported = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    packages = {"absl": "absl-py", "orbax": "orbax-checkpoint"}  # Packages whose name differs from the module's.
    return {packages.get(name, name.replace("_", "-")) for name in imported - sys.stdlib_module_names - {"jaxalign"}}


@pytest.mark.medium
def test_imported_packages_are_declared_and_are_not_other_frameworks():
    """Only the modules of an extra import its libraries."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")

    def declared(pattern: str) -> set[str]:
        names = re.findall(r'"([A-Za-z0-9_-]+)', re.search(pattern, setup, re.DOTALL)[1])
        return {name.replace("_", "-") for name in names}

    listed, others = declared(r"install_requires=\[(.*?)\]"), set(SOURCES)
    for extra, places in EXTRAS.items():
        places = {ROOT / "jaxalign" / place for place in places.split()}
        modules = {path for path in SOURCES if places & {path, *path.parents}}
        assert modules and imported_packages(modules) <= listed | declared(rf'(?:{extra.upper()} = |"{extra}": )(\[.*?\]),?\n')
        others -= modules
    assert imported_packages(others) <= listed
    assert not imported_packages(SOURCES) & FOREIGN


@pytest.mark.process
def test_the_import_contracts_hold():
    done = subprocess.run([sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()",
                           "--no-cache"], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.process
def test_the_train_command_is_imported_without_jax():
    """A finished run or an error is then reported quickly."""
    code = "import sys, jaxalign.train; assert not {'jax', 'flax', 'matplotlib'} & set(sys.modules)"
    run_python(code)


@pytest.mark.medium
def test_each_class_name_has_one_meaning():
    """A reader who meets a name in two files can rely on its being the same class."""
    defined: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(module_name(path))
    assert {name: modules for name, modules in defined.items() if len(modules) > 1} == {}


def test_the_names_that_benchmarks_import_exist():
    """Few of them run in tests."""
    missing = []
    for path in (ROOT / "benchmarks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxalign"):
                module = importlib.import_module(node.module)
                missing += [f"{path.name}: {node.module}.{alias.name}" for alias in node.names
                            if not hasattr(module, alias.name)
                            and importlib.util.find_spec(f"{node.module}.{alias.name}") is None]
    assert missing == []
