"""Reads a rendered report."""

from __future__ import annotations

import html.parser

from jaxalign.tracking.report.page import render_report


class Page(html.parser.HTMLParser):
    """The text of each section, every tag with its attributes, and whether the tags are balanced. `contents` has the text of
    each element with an id, without headings and without sentences about missing parts."""

    _VOID = ("meta", "br", "hr", "img", "input", "link")

    def __init__(self, source):
        super().__init__()
        self.sections, self.contents, self.tags, self._open = {}, {}, [], []
        self.feed(source)
        assert not self._open, f"unclosed: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.handle_data(" ")
        if tag not in self._VOID:
            kept = tag not in ("h1", "h2") and dict(attrs).get("class") != "missing"
            self._open.append((tag, dict(attrs).get("id"), kept))

    def handle_endtag(self, tag):
        assert self._open and self._open[-1][0] == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()
        self.handle_data(" ")

    def handle_data(self, data):
        for place, (tag, name, _) in enumerate(self._open):
            if tag == "section":
                self.sections[name] = self.sections.get(name, "") + data
            if name and all(kept for _, _, kept in self._open[place:]):
                self.contents[name] = self.contents.get(name, "") + data

    def text(self, section):
        return " ".join(self.sections[section].split())

    def links(self):
        """The targets of the links within the page."""
        return [attributes["href"][1:] for tag, attributes in self.tags if tag == "a" and attributes["href"].startswith("#")]


def check_links(path):
    """Check that every link within a report leads to an element with content, and return the targets."""
    page = Page(path.read_text(encoding="utf-8"))
    links = page.links()
    assert links and not [name for name in links if not page.contents.get(name, "").strip()], links
    return links


def render_page(path, **options):
    """Render the report of a work directory, check its links, and return its source and the parsed page."""
    report = render_report(path, **options)
    check_links(report)
    source = report.read_text(encoding="utf-8")
    return source, Page(source)
