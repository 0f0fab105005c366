"""The pages match the code: defaults, paths, commands, options, papers and links."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import shlex

import pytest

from jaxalign import pipeline
from jaxalign.config import Config, PPOConfig, schema
from jaxalign.parallel.distributed import take_flags
from jaxalign.registry.advantages import ADVANTAGES
from jaxalign.registry.objectives import OBJECTIVES
from jaxalign.registry.policy_losses import POLICY_LOSSES
from jaxalign.train import read_arguments
from tests.doc_tables import tables

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
ALGORITHMS = sorted((DOCS / "algorithms").glob("*.md"))


def text_of(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")


def named(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def commands(text: str) -> list[list[str]]:
    """The arguments of every `python -m jaxalign.train` on a page."""
    joined = re.sub(r"\\\n\s*", "", text)
    found = re.findall(r"^ {4}python -m jaxalign\.train(.*)$", joined, re.MULTILINE)
    return [shlex.split(arguments, comments=True) for arguments in found]


def config_of(arguments: list[str]) -> Config:
    """The config of a command that is run in the repository's root."""
    with contextlib.chdir(ROOT):
        return read_arguments(["train", *take_flags(arguments)[1]])[0]


def same(stated: str, value) -> bool:
    stated = stated.strip("`")
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return stated == str(value)
    try:
        return float(stated) == float(value)
    except ValueError:
        return False


def test_defaults_on_the_rl_page_equal_those_of_the_config():
    """If the page writes `field` (value...), the value is the field's default."""
    section = PPOConfig()
    known = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    known |= {f"optimizer.{f.name}": getattr(section.optimizer, f.name) for f in dataclasses.fields(section.optimizer)}
    known |= {f"model.{f.name}": getattr(Config().model, f.name) for f in dataclasses.fields(Config().model)}
    stated = re.findall(r"`([\w.]+)` \(`?([^`:;,) ]+)", text_of(DOCS / "ppo.md"))
    # "(default)" marks a choice, and "([page](...)" is a link.
    found = [(name, value) for name, value in stated if name in known and value != "default" and value[0] != "["]
    assert len(found) > 25
    assert not [f"{name}: {value}, is {known[name]}" for name, value in found if not same(value, known[name])]


@pytest.mark.parametrize("page", [DOCS / "dpo.md", *ALGORITHMS], ids=named)
def test_defaults_in_the_tables_equal_those_of_the_config(page):
    """Tables with the columns option and default; a column "in `configs/NAME.py`" states the values in that file."""
    wrong = []
    for table in tables(text_of(page)):
        for row in table:
            options = re.findall(r"`([\w.]+)`", row.get("option", ""))
            for column in row:
                file = re.fullmatch(r"in `(configs/\w+\.py)`", column)
                if not options or not (file or column == "default"):
                    continue
                config = config_of([f"--config={file[1]}"]) if file else Config()
                values = row[column].split(", ")
                assert len(values) == len(options), row
                wrong += [
                    f"{option}: {value}, is {schema.get(config, option)}"
                    for option, value in zip(options, values, strict=True)
                    if not same(value, schema.get(config, option))
                ]
    assert not wrong


@pytest.mark.parametrize("page", [page for page in ALGORITHMS if page.name not in ("README.md", "off_policy.md")], ids=named)
def test_an_algorithm_page_has_all_parts(page):
    text = text_of(page)
    assert all(f"\n## {part}\n" in text for part in ("Formula", "Details", "Differences")), page
    assert "Source" in text and commands(text)
    assert f"({page.name})" in text_of(DOCS / "algorithms" / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_on_a_page_can_be_run(page, tmp_path):
    """The config is valid, and each stage finds the stages whose output it reads."""
    given = re.compile("FOLDER|FILE|WORKDIR")  # The reader replaces these words.
    for arguments in commands(text_of(page)):
        config = config_of(arguments) if not given.search(" ".join(arguments)) else Config()
        if "callable" not in config.reward.source:  # The reader provides this file.
            assert pipeline.find_changes(config, tmp_path) == {}


@pytest.mark.medium
def test_the_commands_of_the_algorithm_pages_cover_every_choice():
    configs = [config_of(arguments) for page in ALGORITHMS for arguments in commands(text_of(page))]
    assert {config.dpo.objective for config in configs} == set(OBJECTIVES.names())
    assert {config.ppo.advantages for config in configs} == set(ADVANTAGES.names())
    assert {config.ppo.policy_loss for config in configs} == set(POLICY_LOSSES.names())


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_place_that_a_page_names_exists(page):
    """Pages write `path.py` or `path.py: name`, with paths from the root or from jaxalign/."""
    missing = []
    for path, name in re.findall(r"`((?:[\w.]+/)+\w+\.py)(?::\s(\w+))?`", text_of(page)):
        file = next((folder / path for folder in (ROOT, ROOT / "jaxalign") if (folder / path).exists()), None)
        if file is None or (name and not re.search(rf"^\s*(def|class) {name}\b|^{name} =", text_of(file), re.MULTILINE)):
            missing.append(f"{path}: {name}")
    assert not missing


def test_every_option_in_the_tables_for_other_libraries_exists_here():
    """The column "here" of docs/coming_from.md holds options, option=value, or "not here"."""
    rows = [row for table in tables(text_of(DOCS / "coming_from.md")) for row in table]
    assert len(rows) > 150
    for row in rows:
        if row["here"] == "not here":
            continue
        assert re.fullmatch(r"`[\w.=]+`(, `[\w.=]+`)*", row["here"]), row
        for option in re.findall(r"`([\w.=]+)`", row["here"]):
            name, _, value = option.partition("=")
            default = schema.get(Config(), name)
            if value:
                values = {name.rpartition(".")[2]: type(default)(value)}
                for part in reversed(name.split(".")[:-1]):
                    values = {part: values}
                schema.from_mapping(Config(), values)


def test_options_named_in_the_notes_exist():
    """Anything in backticks that looks like a config option must be one."""
    sections = "|".join(field.name for field in dataclasses.fields(Config()))
    for page in [*(DOCS / f"{name}.md" for name in ("coming_from", "dpo", "troubleshooting", "cai_your_model")), *ALGORITHMS]:
        for name in re.findall(rf"`((?:{sections})\.[\w.]+)(?:=[^`]*)?`", text_of(page)):
            if not re.search(r"\.(py|md)$", name) and not name.startswith("reward.reward_"):
                assert _exists_here_or_there(page, name), f"{page.name} names {name}"


def _exists_here_or_there(page: pathlib.Path, name: str) -> bool:
    # Other libraries also have sections of these names; the first column contains their options.
    first = [next(iter(row.values())) for table in tables(text_of(page)) for row in table]
    theirs = {option for cell in first for option in re.findall(r"`([\w.]+)", cell)}
    if page.name == "coming_from.md" and name in theirs:
        return True
    try:
        schema.get(Config(), name)
    except KeyError:
        return False
    return True


def test_every_page_that_the_config_names_exists():
    text = "".join(map(text_of, (ROOT / "jaxalign" / "config").rglob("*.py")))
    pages = set(re.findall(r"docs/([\w/]+\.md)", text))
    assert pages and all((DOCS / page).exists() for page in pages)


def test_the_index_has_every_cited_paper():
    number = re.compile(r"(?<![\d.])\d{4}\.\d{5}(?!\d)")
    files = [path for folder in ("jaxalign", "docs", "configs") for path in (ROOT / folder).rglob("*.*")]
    files = [path for path in files if path.suffix in (".py", ".md") and path != DOCS / "papers.md"]
    cited = {found for path in files for found in number.findall(text_of(path))}
    listed = [row["arXiv"] for table in tables(text_of(DOCS / "papers.md")) for row in table if "arXiv" in row]
    assert len(listed) == len(set(listed))
    assert cited - set(listed) == set(), "cited, but not in docs/papers.md"
    assert set(listed) - cited == set(), "in docs/papers.md, but cited nowhere"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_resolves(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = pathlib.Path(os.path.normpath(page.parent / path)) if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken


def _anchors(page: pathlib.Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
