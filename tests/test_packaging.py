"""An installed package: its files, its program and its version."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from jaxalign import __version__, train

ROOT = pathlib.Path(__file__).resolve().parents[1]


def files(folder: pathlib.Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


@pytest.mark.process
def test_an_installed_package_has_every_file_of_the_package_and_the_configs(tmp_path):
    pytest.importorskip("setuptools")
    metadata, built = tmp_path / "metadata", tmp_path / "built"
    metadata.mkdir()
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info", "--egg-base", metadata, "build_py", "--build-lib", built],
                   cwd=ROOT, check=True, capture_output=True)
    assert files(built / "jaxalign") == files(ROOT / "jaxalign") | {f"configs/{name}" for name in files(ROOT / "configs")}
    assert (metadata / "jaxalign.egg-info/entry_points.txt").read_text().split() == [
        "[console_scripts]", "jaxalign", "=", "jaxalign.__main__:main"]


def test_the_configs_of_an_installed_package_are_found(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "jaxalign"
    (package / "configs").mkdir(parents=True)
    (package / "configs" / "quickstart.py").write_text((ROOT / "configs" / "quickstart.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "__file__", str(package / "train.py"))
    assert train.read_arguments(["train"])[1] == pathlib.Path("runs/quickstart")


def test_the_citation_states_the_version():
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == __version__


def test_the_constraints_pin_every_package_of_the_tests():
    """Extras of devices are not pinned: the version of jax determines theirs."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    required = re.search(r"install_requires=\[(.*?)\]", setup, re.DOTALL)[1] + re.search(r'"endpoint": \[.*?\]', setup)[0]
    required += "".join(re.findall(r"^(?:DOCS|NOTEBOOKS|TEST) = .*$", setup, re.MULTILINE))
    names = set(re.findall(r'"([a-z][\w-]*)(?:\[\w+\])?(?:[>=][^"]*)?"', required)) - {"endpoint"}
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#")
    assert len(names) > 25 and names <= set(pinned)
    assert pinned["torch"] == re.search(r"torch==([\d.]+)", setup)[1]
