import json

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.data.world.principles import PRINCIPLES
from jaxalign.errors import UserError
from jaxalign.feedback.constitution import builtin_names, load_constitution

OURS = {"name": "n", "critique_request": "Any fault?", "revision_request": "Mend it.", "comparison": "Which is better?"}


def write(path, data):
    path.write_text(data if isinstance(data, str) else json.dumps(data), "utf-8")
    return path


def test_builtin_constitutions():
    assert builtin_names() == ("courtesy", "default")
    assert {p.name.split("-")[0] for p in load_constitution("default")} == set(PRINCIPLES)
    assert {p.name.split("-")[0] for p in load_constitution("courtesy")} == {"courtesy"}


def test_builtin_wordings_equal_those_of_the_world():
    known = {p.name: p for wordings in PRINCIPLES.values() for p in wordings}
    for name in builtin_names():
        for principle in load_constitution(name):
            assert principle == known[principle.name]


def test_the_format_of_this_project(tmp_path):
    (principle,) = load_constitution(write(tmp_path / "c.json", {"principles": [OURS]}))
    assert (principle.name, principle.critique_request) == ("n", "Any fault?")
    assert (principle.revision_request, principle.comparison) == ("Mend it.", "Which is better?")


def test_the_format_of_the_paper(tmp_path):
    data = {
        "harmful0": {
            "prompt": ["\n\nCritiqueRequest: Find what is harmful.\n\nCritique:"],
            "edit_request": "\n\nRevisionRequest: Remove it.\n\nRevision:",
        }
    }
    (principle,) = load_constitution(write(tmp_path / "c.json", data))
    assert principle.name == "harmful0"
    assert principle.critique_request == "Find what is harmful."
    assert principle.revision_request == "Remove it."
    assert principle.comparison == "Which of the two answers fares better under this request? Find what is harmful."


def test_the_public_format(tmp_path):
    data = {"constitutions": [{"critic": "Is it kind?", "revision": "Be kind."}] * 2, "system_chat": []}
    first, second = load_constitution(write(tmp_path / "c.json", data))
    assert (first.name, second.name) == ("principle-1", "principle-2")
    assert (first.critique_request, first.revision_request) == ("Is it kind?", "Be kind.")
    assert first.comparison.endswith("Is it kind?")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "is a list"),
        ({}, "has no principles"),
        ({"principles": []}, "has no principles"),
        ({"principles": "x"}, '"principles" of constitution .* is a str'),
        ({"principles": [1]}, "principle 1 of constitution .* is a int"),
        ({"principles": [{**OURS, "comparison": " "}]}, 'no text in "comparison"'),
        ({"principles": [OURS, OURS]}, "names 'n' more than once"),
        ({"constitutions": [{"critic": "x"}]}, 'no text in "revision"'),
        ({"harmful0": {"prompt": [], "edit_request": "x"}}, 'no text in "prompt"'),
        ({"harmful0": {"prompt": ["CritiqueRequest: Critique:"], "edit_request": "x"}}, "request without text"),
        ({"rules": ["be good"]}, "unknown format"),
    ],
)
def test_mistakes_are_named(tmp_path, data, sentence):
    with pytest.raises(UserError, match=sentence):
        load_constitution(write(tmp_path / "c.json", data))


def test_texts_are_principles(tmp_path):
    """Those of a .txt file, and texts in the place of objects. A byte order mark, which Windows editors write, is left out."""
    (tmp_path / "own.txt").write_bytes(b"\xef\xbb\xbf# Mine\r\n- Be kind.\r\n\r\n 2. Do not lie.\r\n")
    (tmp_path / "own.json").write_bytes(b'\xef\xbb\xbf{"principles": ["Be kind.", "Do not lie."]}')
    for name in ("own.txt", "own.json"):
        principles = load_constitution(tmp_path / name)
        assert [p.name for p in principles] == ["principle-1", "principle-2"]
        assert [p.comparison.rpartition("? ")[2] for p in principles] == ["Be kind.", "Do not lie."]


def test_missing_and_undecodable_files(tmp_path):
    with pytest.raises(UserError, match="no_such does not exist.*courtesy, default"):
        load_constitution("no_such")
    (tmp_path / "c.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match="not UTF-8"):
        load_constitution(tmp_path / "c.json")


@pytest.mark.parametrize(("content", "sentence"), [
    ("{broken", "is not JSON"), ("[1, 2]", "is a list"), (None, "does not exist"),
])
def test_an_invalid_constitution_is_refused_before_any_stage_runs(tmp_path, content, sentence):
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    config = from_config_dict({"stages": ("pretrain", "revise"), "feedback": {"constitution": str(path)}})
    with pytest.raises(UserError, match=sentence):
        pipeline.run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "pretrain").exists()
