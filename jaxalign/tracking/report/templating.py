"""Renders the report's templates. Every text of a run, in particular model output, is escaped."""

from __future__ import annotations

import functools
from typing import Any

import jinja2
from markupsafe import Markup


def render(template: str, **values: Any) -> Markup:
    """Renders a template of `templates/` with these values."""
    return Markup(_environment().get_template(template).render(**values))


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("jaxalign.tracking.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
