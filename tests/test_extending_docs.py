"""Every code block of docs/extending.md runs unchanged, with a tiny model as FOLDER, and every kind has one."""

from __future__ import annotations

import contextlib
import pathlib
import re

import pytest

from jaxalign import registries
from jaxalign.registry.core import Registry
from tests.folders import write_model

pytestmark = pytest.mark.usefixtures("few_sampling_programs", "no_checks_of_step_zero")

PAGE = (pathlib.Path(__file__).resolve().parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n")[0]: part.split("```python\n")[1:] for part in re.split("\n##+ ", PAGE)[1:]}
BLOCKS = {f"{title}, {number}": block.split("```")[0]
          for title, blocks in SECTIONS.items() for number, block in enumerate(blocks, 1)}
EXAMPLES = [part.split("\n")[0] for part in PAGE.split("\n### ")[1:]]
KINDS = re.findall(r"^\| ([a-z ]+) \| ", PAGE.split("| kind |")[1].split("\n\n")[0], re.MULTILINE)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "FOLDER")


@pytest.fixture
def unregistered():
    """Removes what a block registers."""
    owned = [registry for registry in vars(registries).values() if isinstance(registry, Registry)]
    before = [set(registry.names()) for registry in owned]
    yield
    for registry, names in zip(owned, before, strict=True):
        for name in set(registry.names()) - names:
            registry.unregister(name)


@pytest.mark.slow
@pytest.mark.parametrize("title", BLOCKS)
def test_the_block_runs(title, model, tmp_path, monkeypatch, capsys, unregistered):
    (tmp_path / "FOLDER").symlink_to(model)
    with contextlib.chdir(tmp_path):
        exec(compile(BLOCKS[title], f"docs/extending.md: {title}", "exec", dont_inherit=True), {"__name__": "block"})
    assert capsys.readouterr().out


def test_every_kind_of_the_table_has_a_block():
    assert sorted(title.lower() for title in EXAMPLES) == sorted(KINDS) and len(KINDS) == 10
    assert all(SECTIONS[title] for title in EXAMPLES) and PAGE.count("```python") == len(BLOCKS)
