"""Reads a rendered report."""

from __future__ import annotations

import html.parser

from jaxalign.tracking.report.page import render_report


class Page(html.parser.HTMLParser):
    """The text of each section, every tag with its attributes, and whether the tags are balanced."""

    _VOID = ("meta", "br", "hr", "img", "input", "link")

    def __init__(self, source):
        super().__init__()
        self.sections, self.tags, self._open = {}, [], []
        self.feed(source)
        assert not self._open, f"unclosed: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.handle_data(" ")
        if tag not in self._VOID:
            self._open.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag):
        assert self._open and self._open[-1][0] == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()
        self.handle_data(" ")

    def handle_data(self, data):
        for tag, name in self._open:
            if tag == "section":
                self.sections[name] = self.sections.get(name, "") + data

    def text(self, section):
        return " ".join(self.sections[section].split())


def render_page(path, **options):
    source = render_report(path, **options).read_text(encoding="utf-8")
    return source, Page(source)
