"""MkDocs hooks: pages made of files outside docs/, so that one link works on the site and in the repository.

- README.md is the home page, index.md.
- notebooks/NAME.ipynb is the page tutorials/NAME.md.
- Every other file that a page links to is a page under repository/, or, if it is not text, is left out with a warning.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
_LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml", ".json": "json", "": ""}
_HOME = "README.md"
_ALWAYS = (_HOME, "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")


def on_files(files: Files, config) -> Files:
    """Adds the pages of files outside docs/, and of the files that those link to."""
    notebooks = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    linked = [target for file in files.documentation_pages()
              for target in _targets(f"docs/{file.src_uri}", file.content_string)]
    waiting, done = [*_ALWAYS, *notebooks, *linked], set()
    while waiting:
        source = waiting.pop()
        if source in done or source.startswith("docs/") or not (ROOT / source).is_file():
            continue
        done.add(source)
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".ipynb"):
            text = _notebook(json.loads(text), source)
        elif not source.endswith(".md"):
            text = f"# {source}\n\n````{_LANGUAGES.get(Path(source).suffix, '')}\n{text}````\n"
        if source.endswith((".md", ".ipynb")):
            waiting += _targets(source, text)
            text = _rewritten(source, text)
        files.append(File.generated(config, page_of(source), content=text))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Points the links of a page of docs/ to the pages of the site."""
    if page.file.generated_by:
        return markdown
    return _rewritten(f"docs/{page.file.src_uri}", markdown)


def page_of(source: str) -> str:
    """The page of a file of the repository, relative to docs/."""
    if source == _HOME:
        return "index.md"
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if source.endswith(".ipynb"):
        return f"tutorials/{Path(source).stem}.md"
    return f"repository/{source}" if source.endswith(".md") else f"repository/{source}.md"


def _targets(source: str, text: str) -> list[str]:
    """The files that a file links to, relative to the root of the repository."""
    return [posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) for path, _ in _LINK.findall(text)]


def _rewritten(source: str, text: str) -> str:
    here = posixpath.dirname(page_of(source))

    def place(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        if (ROOT / target).is_dir():
            target = f"{target}/README.md" if (ROOT / target / "README.md").is_file() else target
        if not (ROOT / target).is_file():
            return match[0]  # MkDocs warns about it.
        return os.path.relpath(page_of(target), here or ".").replace(os.sep, "/") + (match[2] or "")

    return _LINK.sub(place, text)


def _notebook(notebook: dict, source: str) -> str:
    """The text and the code of a notebook; outputs are left out."""
    parts = []
    for number, cell in enumerate(notebook["cells"]):
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        if not number:
            parts.append(f"!!! note\n    This page is the notebook `{source}` of the repository. The tests run its cells.")
    return "\n\n".join(parts) + "\n"
