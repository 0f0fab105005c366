"""The documentation site: it builds without a warning, and has every page, notebook and public name."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

import jaxalign

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def test_the_api_page_has_every_public_name():
    listed = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    modules = {place.removesuffix(":") for place in jaxalign._PUBLIC.values() if place.endswith(":")}
    names = {path.rpartition(".")[2] for path in listed}
    assert names == set(jaxalign._PUBLIC) and modules <= set(listed)


@pytest.mark.process
@pytest.mark.slow
def test_the_site_builds_strictly_with_every_page(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)], cwd=ROOT,
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")]
    for page in [*pages, *(pathlib.Path("tutorials", path.stem) for path in (ROOT / "notebooks").glob("*.ipynb"))]:
        folder = page.parent if page.name == "README" else page
        assert (tmp_path / folder / "index.html").exists(), page
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'href="plan/"' in home and 'href="repository/benchmarks/RESULTS/"' in home and "docs/plan.md\"" not in home
    assert "the step-0 checks; empty until they have run" in (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
