"""`python -m jaxalign.world`: the exported folder, its config, the scores, and one sentence for every mistake."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.config import from_config_dict
from jaxalign.data.sources.asked import read_asked
from jaxalign.data.world import chat_text, details, gold
from jaxalign.data.world.principles import PRINCIPLES
from jaxalign.errors import UserError
from jaxalign.feedback.constitution import load_constitution
from jaxalign.feedback.rubrics import load_rubrics
from jaxalign.models.language_model import load_model
from jaxalign.records import Message
from jaxalign.world import main

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world") / "stranger"
    sizes = ("--tokens=8000", "--steps=1", "--prompts=40", "--judge_steps=1")
    assert main(["world", f"--export={folder}", "--seed=3", *sizes]) == 0
    return folder


def own_model():
    spec = importlib.util.spec_from_file_location("own_model", ROOT / "configs" / "own_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_prompts_are_those_of_the_world_without_evaluation_in_training(folder):
    asked = {name: [prompt.messages[-1].content for prompt in read_asked(str(folder / f"prompts/{name}.jsonl"))]
             for name in ("red_team", "helpful", "rl", "eval")}
    world = chat_text.chat_world(3)
    assert asked["eval"] == [prompt.messages[-1].content for prompt in world.prompts("evaluate", 40)]
    assert not set(asked["eval"]) & {text for name in ("red_team", "helpful", "rl") for text in asked[name]}
    assert all(len(texts) == 40 for texts in asked.values())


@pytest.mark.slow
def test_the_constitutions_are_read_as_files_of_a_user(folder):
    assert load_constitution(folder / "constitution.json") == load_constitution("default")
    assert load_constitution(folder / "constitution_courtesy.json") == load_constitution("courtesy")


@pytest.mark.slow
def test_the_prompts_for_evaluation_and_no_others_have_their_kinds(folder):
    """By the gold judge of a world with the same seed."""
    kinds = {"harmful": "harmful", "harmful_disguised": "harmful", "benign": "benign", "benign_scary": "borderline"}
    world = chat_text.chat_world(3)
    for name in ("red_team", "helpful", "rl", "eval"):
        rows = [json.loads(line) for line in (folder / f"prompts/{name}.jsonl").read_text().splitlines()]
        if name == "eval":
            expected = [kinds[gold.judge(world, prompt, "").kind] for prompt in world.prompts("evaluate", 40)]
            assert [row["kind"] for row in rows] == expected and set(expected) == {"harmful", "benign", "borderline"}
        else:
            assert all(set(row) == {"prompt"} for row in rows)


@pytest.mark.slow
def test_the_rubrics_ask_what_the_model_has_learned_to_rate(folder):
    rubrics = load_rubrics(str(folder / "rubrics.json"))
    assert [rubric.name for rubric in rubrics] == ["harmful", "helpful", "evasive"]
    learned = {principle.critique_request for axis in PRINCIPLES.values() for principle in axis}
    assert {rubric.question for rubric in rubrics} <= learned
    assert {kind for rubric in rubrics for kind in rubric.kinds} == {"harmful", "benign", "borderline"}


@pytest.mark.slow
def test_the_second_judge_has_its_own_weights_and_rubrics_that_it_has_learned_to_rate(folder):
    rubrics = {rubric.name: rubric for rubric in load_rubrics(str(folder / "judge_rubrics.json"))}
    assert rubrics["helpful"].question == details.PRINCIPLE.critique_request
    first = {rubric.name: rubric for rubric in load_rubrics(str(folder / "rubrics.json"))}
    assert [rubrics[name] for name in ("harmful", "evasive")] == [first[name] for name in ("harmful", "evasive")]
    values = own_model().get_config(str(folder))  # With the flags that the command prints.
    values.evaluate.rubrics, values.judge.evaluate = str(folder / "judge_rubrics.json"), "model"
    values.judge.path = (str(folder / "judge"),)
    assert from_config_dict(values).judge.path == (str(folder / "judge"),)
    weights = [load_model(folder / name).weights["embedding"] for name in ("model", "judge")]
    assert not np.array_equal(*weights)


@pytest.mark.slow
def test_the_text_sample_has_facts_without_dialogues(folder):
    rows = [json.loads(line) for line in (folder / "text.jsonl").read_text().splitlines()]
    assert rows and all(set(row) == {"text"} and "so it does" in row["text"] for row in rows)


@pytest.mark.slow
def test_the_model_loads_as_a_chat_model_that_stops_at_the_end_of_a_turn(folder):
    policy = load_model(folder / "model")
    assert policy.style == "chat" and policy.max_length == 512
    assert [policy.tokenizer.piece(i) for i in policy.stop_ids] == ["<|im_end|>"]


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_reads_the_same_ids_and_logits(folder):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    policy = load_model(folder / "model")
    library = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    ids = library.apply_chat_template([{"role": "user", "content": "How do I use sage?"}], add_generation_prompt=True,
                                      tokenize=True, return_dict=False)
    assert ids == policy.prompt_ids((Message("user", "How do I use sage?"),))
    assert model.generation_config.eos_token_id == policy.tokenizer.eos_id
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    found = np.asarray(policy.model.logits(policy.weights, policy.model.hidden(policy.weights, jnp.asarray([ids]))))[0]
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_the_config_of_the_folder_is_valid_and_names_a_missing_file(folder, tmp_path):
    config = from_config_dict(own_model().get_config(str(folder)))
    assert config.data.eval == str(folder / "prompts/eval.jsonl")
    assert config.stages == ("revise", "sft", "compare", "preference", "ppo", "evaluate", "report")
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "constitution.json").unlink()
    with pytest.raises(UserError, match="constitution.json does not exist.*feedback.constitution"):
        own_model().get_config(str(tmp_path / "copy"))
    with pytest.raises(UserError, match="needs a folder"):
        own_model().get_config()


def test_the_command_prints_scores(tmp_path, capsys):
    prompt = chat_text.chat_world(3).prompts("evaluate", 1)[0].messages[-1].content
    row = {"model": "base", "messages": [{"role": "user", "content": prompt}], "response": "I cannot talk about that."}
    (tmp_path / "rows-00000.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["world", f"--score={tmp_path}", "--seed=3"]) == 0
    assert "| base |" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    ((), "exactly one of --export=DIR and --score=ROWS"),
    (("--export=a", "--score=b"), "exactly one of --export=DIR and --score=ROWS"),
    (("--score=b", "--steps=3"), "--steps is given with --score"),
    (("--export=a", "--judge_steps=-1"), "--judge_steps"),
    (("--export=a", "--stepz=3"), "--help lists the flags"),
    (("--export=a", "more"), "'more' is not expected"),
])
def test_mistakes_on_the_command_line(arguments, message, capsys):
    assert main(["world", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_with_files_is_kept(folder, capsys):
    before = sorted(folder.rglob("*"))
    assert main(["world", f"--export={folder}"]) == 2
    assert f"{folder} already exists" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before
