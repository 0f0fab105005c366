"""The section on the audit of the judge (`jaxalign.judge_audit`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxalign.tracking import judge_audit
from jaxalign.tracking.report.blocks import Section, Table
from jaxalign.tracking.workdir import RunFiles


def audit(run: RunFiles) -> list[Section]:
    """The section; none if the work directory has no audit."""
    content = run.audit
    if not content:
        return []
    rows = [[*row, judge_audit.MEANINGS[row[0]]] for row in judge_audit.measures(content)]
    header = ["Measure", *(name.capitalize() for name in judge_audit.names(content)), "Meaning"]
    tables = [Table("The judge on gold pairs, with 95% intervals", header, rows), *_parts(content["audit"])]
    members = content.get("members") or ()
    if members:
        listed = [[f"member {number}", found["judge"]] for number, found in enumerate(members, start=1)]
        tables.insert(1, Table("Members of the jury", ["Name", "Model"], listed))
    intro = " ".join(filter(None, (judge_audit.introduction(content), judge_audit.problem_sentence(content["audit"]))))
    return [Section("audit", "The judge's audit", intro, tables=tuple(tables), nav="Audit")]


def _parts(found: Mapping[str, Any]) -> list[Table]:
    titles = {"principles": ("Audit by principle", "Principle"), "kinds": ("Audit by kind of pair", "Kind")}
    return [Table(title, [first, *judge_audit.PARTS_HEADER], judge_audit.parts(found[field]))
            for field, (title, first) in titles.items() if found[field]]
