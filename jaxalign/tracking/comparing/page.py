"""Renders a comparison of runs as one HTML file, like the report: no scripts, nothing to load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxalign.errors import UserError
from jaxalign.storage import write_atomically
from jaxalign.tracking.comparing import sections
from jaxalign.tracking.comparing.runs import ComparedRun, affects_results, read_runs, setting_differences
from jaxalign.tracking.estimates import MAIN_MEASURES, compared_measures
from jaxalign.tracking.report.page import CONTROL
from jaxalign.tracking.report.roles import joined
from jaxalign.tracking.report.templating import render

_FEW = 6  # Settings named in the opening.


def render_comparison(workdirs: Sequence[str | Path], target: Path) -> list[str]:
    """Writes the page, replacing it atomically.

    Args:
      workdirs: the work directories of 2 to 6 runs, finished or not. The first one is the one to which the others are compared.
      target: the HTML file.

    Returns:
      A sentence for each run that is left out because its files cannot be read.

    Raises:
      UserError: fewer than two runs can be read, or the page cannot be written.
    """
    runs, problems = read_runs(workdirs)
    try:
        every = (sections.rates(runs), *sections.alerts(runs), sections.settings(runs), sections.data(runs),
                 *sections.curves(runs), sections.answers(runs), sections.times(runs))
        page = render("comparison.html.j2", names=[run.name for run in runs], problems=problems, lead=lead(runs),
                      sections=[section for section in every if section.filled or section.missing])
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(f"the runs cannot be compared, because a file of a stage has another form than expected "
                        f"({type(error).__name__}: {error}); leave out one run after the other to find it") from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, CONTROL.sub("\ufffd", page))
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}); give another file as --out") from None
    return problems


def lead(runs: Sequence[ComparedRun]) -> list[str]:
    """The opening: what differs between the runs, and which differences of results are more than noise."""
    names = [name for name in setting_differences(runs) if affects_results(name)]
    listed = joined([*names[:_FEW], *([f"{len(names) - _FEW} more"] if len(names) > _FEW else [])])
    sentences = [f"The runs differ in {len(names)} settings on which results can depend: {listed}." if len(names) > 1 else
                 f"The runs differ in one setting on which results can depend: {listed}." if names else
                 "All settings on which results can depend are the same."]
    measures = [one for one in compared_measures([run.evaluated for run in runs]) if one.name in MAIN_MEASURES]
    for index, run in enumerate(runs[1:], 1):
        pairs = [(one, one.differences()[index]) for one in measures]
        known = [(one, difference) for one, difference in pairs if difference is not None]
        clear = [f"{one.title.lower()} {one.difference_words(difference)}" for one, difference in known
                 if difference.clear]
        rest = [one.title.lower() for one, difference in known if not difference.clear and difference.value]
        if known:
            parts = [f"{'; '.join(clear)}"] if clear else []
            parts += [f"the differences in {joined(rest)} are within noise"] if rest else []
            found = "; ".join(parts) or "no difference in the main measures"
            sentences.append(f"{run.name} against {runs[0].name}: {found}.")
    unfinished = [run.name for run in runs if any(files.status != "done" for files in run.files.runs.values())]
    if unfinished:
        sentences.append(f"Not finished: {joined(unfinished)}.")
    return sentences
