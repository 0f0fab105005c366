"""The section on the audit of the judge (`jaxalign.judge_audit`)."""

from __future__ import annotations

from jaxalign.tracking import judge_audit
from jaxalign.tracking.report.blocks import ReportSection, Table
from jaxalign.tracking.workdir import RunFiles


def audit(run: RunFiles) -> list[ReportSection]:
    """The section; none if the work directory has no audit."""
    content = run.audit
    if not content:
        return []
    rows = [[*row, judge_audit.MEANINGS[row[0]]] for row in judge_audit.measures(content)]
    header = ["Measure", *(name.capitalize() for name in judge_audit.names(content)), "Meaning"]
    tables = [Table("The judge on gold pairs, with 95% intervals", header, rows)]
    members = content.get("members") or ()
    if members:
        listed = [[f"member {number}", member["judge"]] for number, member in enumerate(members, start=1)]
        tables.append(Table("Members of the jury", ["Name", "Model"], listed))
    for field, title, first in (("principles", "Audit by principle", "Principle"), ("kinds", "Audit by kind of pair", "Kind")):
        if parts := content["audit"][field]:
            tables.append(Table(title, [first, *judge_audit.PARTS_HEADER], judge_audit.parts(parts)))
    intro = " ".join(filter(None, (judge_audit.introduction(content), judge_audit.problem_sentence(content["audit"]))))
    return [ReportSection("audit", "The judge's audit", intro, tables=tuple(tables), nav="Audit")]
