"""What the checks decide for the config, with judges and revisions that are given."""

from __future__ import annotations

import pytest

from jaxalign.errors import UserError
from jaxalign.feedback.audit import Trial, make_audit
from jaxalign.feedback.judge import Verdict
from jaxalign.records import Message, Prompt, Revision
from jaxalign.starter import checks
from jaxalign.starter.checks import RevisionTrial
from jaxalign.starter.facts import read_facts
from jaxalign.starter.judging import Judged
from tests import made_tokenizers
from tests.folders import write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The facts of a chat model and of a base model with the same weights."""
    root = tmp_path_factory.mktemp("models")
    return {name: read_facts(write_model(root / name, template, 1024))
            for name, template in {"chat": made_tokenizers.CHATML, "base": None}.items()}


def audited(right: bool) -> dict:
    """The audit of a judge that is always right, or that always prefers the first answer."""
    trials = [Trial(row, "first", (9, 9), "p", "harm", (Verdict(0.9), Verdict(0.1 if right else 0.9))) for row in range(20)]
    return make_audit(trials, 0.1).to_dict()


def revisions(*outcomes: str | None) -> RevisionTrial:
    prompt = Prompt("1", (Message("user", "Why?"),), "red_team")
    return RevisionTrial([Revision(prompt, 1, "p", "No.", "It is short.", "Because.", name is None, name) for name in outcomes])


@pytest.fixture
def chosen(models, tmp_path, monkeypatch):
    """(choice, the lines) of the checks. judges: by template set, whether it is right, or None if it cannot be asked."""

    def call(kind: str, judges: dict[str, bool | None], trial: RevisionTrial):
        asked = []

        def check_judge(config, templates):
            asked.append(templates)
            if judges[templates] is None:
                raise UserError(f"{templates} does not fit")
            return Judged(templates, audited(judges[templates]))

        monkeypatch.setattr(checks, "check_judge", check_judge)
        monkeypatch.setattr(checks, "try_revisions", lambda config: trial)
        lines = []
        choice = checks.choose(models[kind], tmp_path, True, lambda finding: lines.append(finding.line()))
        assert asked == list(judges)
        return choice, lines

    return call


GOOD = revisions(None, None, "unchanged", "cut_off")


def test_a_model_that_judges_and_revises_gets_no_rehearsal(chosen):
    choice, lines = chosen("chat", {"chat": True}, GOOD)
    assert (choice.templates, choice.rehearsal, choice.keep) == ("chat", False, ())
    assert [line.split(":")[0] for line in lines] == [f"ok      {topic}" for topic in
                                                      ("model", "template", "memory", "judge", "revisions")]
    assert "3 of 4 revisions could be trained on; the others: 1 cut_off (the text reached the length limit)" in lines[-1]


def test_a_chat_model_that_judges_only_with_examples_gets_the_transcripts(chosen):
    choice, _ = chosen("chat", {"chat": False, "transcript": True}, GOOD)
    assert (choice.templates, choice.rehearsal) == ("transcript", False)


def test_a_form_that_does_not_fit_is_left_out(chosen):
    choice, lines = chosen("chat", {"chat": None, "transcript": False}, GOOD)
    assert (choice.templates, choice.rehearsal) == ("transcript", True)
    assert "prefers the answer shown first in 100% of the cases" in lines[3] and "a larger model" in lines[3]


def test_a_model_that_cannot_be_asked_at_all_is_refused(chosen):
    with pytest.raises(UserError, match="transcript does not fit"):
        chosen("base", {"transcript": None}, GOOD)


def test_unusable_revisions_are_kept_for_a_rehearsal(chosen):
    choice, lines = chosen("base", {"transcript": False}, revisions("cut_off", "cut_off", "empty", "grown", None))
    assert choice.keep == ("grown", "cut_off") and choice.rehearsal
    assert "its instruction-tuned version" in lines[2] and "1 of 5 revisions could be trained on" in lines[3]
    assert "raise revise.max_new_tokens" in lines[3]
