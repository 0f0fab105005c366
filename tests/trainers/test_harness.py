"""lm-evaluation-harness: its numbers on our models equal those of its own Hugging Face backend on the exported folder."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxalign as ja
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.checkpoints.export import export
from jaxalign.models.families.llama import config_json
from jaxalign.models.model import Model
from tests import made_tokenizers
from tests.folders import MAX_LENGTH
from tests.harness_tasks import NAMES, write_tasks

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return str(write_tasks(tmp_path_factory.mktemp("tasks") / "made"))


VOCAB = 400  # No tokenizer here has more tokens. With one size, models share programs.


def write(folder, kind):
    """Write a random model with the tokenizer `kind` of `made_tokenizers`."""
    texts = getattr(made_tokenizers, kind)(folder.parent / "tokenizer")
    tokenizer = load_tokenizer(texts)
    model = Model(DecoderConfig(VOCAB, 2, 16, 4, 2, 4, 20))
    raw = config_json(model.config, MAX_LENGTH) | {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id}
    export(folder, model, model.init(jax.random.key(1)), config=raw, source=texts)
    return folder


@pytest.fixture(scope="module", params=["qwen", "llama3", "llama2"])
def folder(request, tmp_path_factory):
    """A model with bos or without, and with a tokenizer that puts a space before every text."""
    return write(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def ours(folder):
    return ja.lm_eval_model(ja.load_model(folder), batch=8, progress=False)


@pytest.fixture(scope="module")
def theirs(folder):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return ja.load_model(write(tmp_path_factory.mktemp("policy") / "qwen", "qwen"))


@pytest.fixture(scope="module")
def lm(policy):
    return ja.lm_eval_model(policy, batch=8, progress=False)


def requests(kind, *arguments):
    return [Instance(kind, {}, one, 0) for one in arguments]


LONG = "Once upon a time there was a fox. " * 12
PAIRS = [("", "the cat sat"), (LONG, " on the mat."), ("Why? ", "It slept."), ("<|im_start|>user", "\nHello.")]
GREEDY = {"until": ["sat"], "max_gen_toks": 24}


def evaluated(model, tasks, chat):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    return simple_evaluate(model=model, tasks=list(NAMES), bootstrap_iters=100, apply_chat_template=chat,
                           task_manager=TaskManager(include_path=tasks, include_defaults=False))


@pytest.mark.variants(1)
@pytest.mark.parity
def test_tasks_have_the_numbers_of_the_hugging_face_backend(folder, ours, theirs, tasks, monkeypatch):
    """As a chat with bos and without, and as text that begins with a space. The next test has text for every tokenizer."""
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    found, expected = (evaluated(model, tasks, chat=folder.name != "llama2") for model in (ours, theirs))
    assert set(found["results"]) == set(NAMES)
    for name in NAMES:
        for metric, value in expected["results"][name].items():
            if isinstance(value, float):
                assert found["results"][name][metric] == pytest.approx(value, rel=1e-4), (name, metric)
        for own, other in zip(found["samples"][name], expected["samples"][name], strict=True):
            assert own["arguments"] == other["arguments"]
            if name == "made_answer":
                assert own["resps"] == other["resps"]
            else:
                np.testing.assert_allclose(own["resps"], other["resps"], rtol=1e-5, atol=1e-4)


@pytest.mark.parity
def test_long_and_empty_contexts_are_cut_as_by_the_hugging_face_backend(ours, theirs):
    pairs = requests("loglikelihood", *PAIRS)
    found, expected = (model.loglikelihood(pairs, disable_tqdm=True) for model in (ours, theirs))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    asked = requests("generate_until", (LONG, GREEDY))
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)


def test_a_continuation_has_the_log_probability_of_its_tokens_after_the_context(lm, policy):
    """Worked out from the logits of a single pass in float64."""
    context, continuation = policy.tokenizer.encode("the cat"), policy.tokenizer.encode(" sat on", continues=True)
    logits = policy.model.logits(policy.weights, policy.model.hidden(policy.weights, np.asarray([context + continuation])))[0]
    logits = np.asarray(logits, np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = sum(logprobs[len(context) + i - 1, token] for i, token in enumerate(continuation))
    greedy = int(np.argmax(logits[len(context) - 1]))
    texts = (("the cat", " sat on"),)
    assert lm._loglikelihood_tokens([(*texts, context, continuation), (*texts, context, [greedy])]) == [
        (pytest.approx(expected, abs=1e-4), False), (pytest.approx(logprobs[len(context) - 1].max(), abs=1e-4), True)]


@pytest.mark.slow
def test_a_mesh_and_another_batch_give_the_same_numbers(policy, lm, tmp_path):
    policy.save(tmp_path / "model")
    split = ja.load_model(tmp_path / "model", mesh=ja.Mesh(data=2, fsdp=2, tensor=2))
    mesh, pairs = ja.lm_eval_model(split, batch=3, progress=False), requests("loglikelihood", *PAIRS)
    found, expected = (model.loglikelihood(pairs, disable_tqdm=True) for model in (mesh, lm))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    asked = requests("generate_until", ("the cat", GREEDY), ("Why", GREEDY))
    assert mesh.generate_until(asked) == lm.generate_until(asked)


def test_an_answer_ends_before_the_first_stop_text(lm):
    (whole,) = lm.generate_until(requests("generate_until", ("What is 2?", {"until": [], "max_gen_toks": 24})))
    for end in (whole[3], whole[4:7]):
        (text,) = lm.generate_until(requests("generate_until", ("What is 2?", {"until": [end], "max_gen_toks": 24})))
        assert text == whole[: whole.index(end)]


def test_repeated_samples_differ_and_depend_on_the_seed(policy):
    drawn = {"until": [], "max_gen_toks": 24, "do_sample": True, "temperature": 1.0}
    asked = requests("generate_until", ("the cat", drawn), ("the cat", drawn))
    models = (ja.lm_eval_model(policy, batch=2, seed=seed, progress=False) for seed in (0, 0, 1))
    first, again, other = (model.generate_until(asked) for model in models)
    assert first == again and len({*first, *other}) == 4


@pytest.mark.parametrize(("options", "message"), [
    ({"until": [], "num_beams": 4}, "generation option num_beams=4, which is not supported"),
    ({"until": []}, "asks for 256 new tokens, but the maximum length of prompt plus answer is 128"),
])
def test_options_that_are_not_supported_are_named(lm, options, message):
    with pytest.raises(ja.UserError, match=message):
        lm.generate_until(requests("generate_until", ("the cat", options)))


def test_an_empty_continuation_is_refused(lm):
    with pytest.raises(ja.UserError, match="has 0 tokens; 1 to 128 .* are expected"):
        lm.loglikelihood(requests("loglikelihood", ("the cat", "")), disable_tqdm=True)


def test_weights_that_are_not_finite_are_refused(policy):
    broken = policy.with_params(jax.tree.map(lambda x: x * np.nan, policy.params))
    with pytest.raises(ja.UserError, match="logits are not finite"):
        ja.lm_eval_model(broken, progress=False).loglikelihood(requests("loglikelihood", ("the", " cat")), disable_tqdm=True)
