"""The embedded world: its random draws, its prompt sets and the content of its pretraining text."""

import collections
import itertools
import re

import pytest

from jaxalign.data.chat import formats
from jaxalign.data.world import gold, make_world, vocabulary
from jaxalign.data.world.documents import count_tokens
from jaxalign.data.world.facts import CLASS_OF
from jaxalign.data.world.requests import SOURCES
from jaxalign.errors import UserError

ALL = {source: 1500 for source in SOURCES}
NOISY = 0.05  # Four standard deviations of a share of one half over 1,600 draws.


@pytest.fixture(scope="module")
def world():
    return make_world(3)


@pytest.fixture(scope="module")
def documents(world):
    return list(world.documents("train", 300_000))


def of_kind(documents, marker):
    return [d for d in documents if marker in d]


def test_equal_seeds_give_equal_worlds_and_different_seeds_do_not(world, documents):
    again = make_world(3)
    assert again.topics == world.topics
    assert again.prompts("rl", 50) == world.prompts("rl", 50)
    assert list(itertools.islice(again.documents("train", 300_000), 50)) == documents[:50]
    assert make_world(4).topics != world.topics


def test_facts(world):
    assert len(world.topics) == 60
    assert sum(topic.held_out for topic in world.topics) == 24
    assert len({topic.name for topic in world.topics}) == 60
    for topic in world.topics:
        assert len({relation.target for relation in topic.relations}) == 4
        assert [len(topic.good), len(topic.relations)] == [2, 4]
        for relation in topic.relations:
            pool = vocabulary.GOOD_EFFECTS if relation.good else vocabulary.BAD_EFFECTS
            assert relation.effect in pool[CLASS_OF[relation.target]]


def test_effects_and_rude_words_are_unambiguous():
    good, bad = ({e for pool in p.values() for e in pool} for p in (vocabulary.GOOD_EFFECTS, vocabulary.BAD_EFFECTS))
    assert not good & bad
    assert len(vocabulary.RUDE) == len(vocabulary.RUDE_WORDS)
    for sentence, word in zip(vocabulary.RUDE, vocabulary.RUDE_WORDS, strict=True):
        assert word in re.findall(r"[a-z]+", sentence.lower())


def test_prompt_sets_are_large_distinct_and_disjoint(world):
    texts = {source: [p.messages[0].content for p in world.prompts(source, ALL[source])] for source in SOURCES}
    for found in texts.values():
        assert len(set(found)) == len(found)
    for one, other in itertools.combinations(texts.values(), 2):
        assert not set(one) & set(other)
    assert sum(len(found) for found in texts.values()) > 5000


def test_prompts_do_not_contain_the_truth(world):
    for source in SOURCES:
        for i, prompt in enumerate(world.prompts(source, 20)):
            assert prompt.id == f"{source}-{i:05d}"
            assert prompt.source == source
            assert [message.role for message in prompt.messages] == ["user"]


def test_evaluation_is_balanced_and_only_on_held_out_topics(world):
    held_out = {topic.name for topic in world.topics if topic.held_out}
    prompts = world.prompts("evaluate", 480)
    for prompt in prompts:
        assert held_out & set(re.findall(r"[a-z]+", prompt.messages[0].content))
    kinds = collections.Counter(gold.judge(world, prompt, "").kind for prompt in prompts)
    assert kinds == dict.fromkeys(("harmful", "harmful_disguised", "benign", "benign_scary"), 120)


@pytest.mark.parametrize(
    ("source", "shares"),
    [
        ("red_team", {"harmful": 0.3, "harmful_disguised": 0.3, "benign": 0.2, "benign_scary": 0.2}),
        ("helpful", {"benign": 0.6, "benign_scary": 0.4}),
    ],
)
def test_training_prompts_cover_all_topics_and_mix_kinds(world, source, shares):
    prompts = world.prompts(source, 400)
    kinds = collections.Counter(gold.judge(world, prompt, "").kind for prompt in prompts)
    assert kinds == {kind: 400 * share for kind, share in shares.items()}
    words = {word for prompt in prompts for word in re.findall(r"[a-z]+", prompt.messages[0].content)}
    assert {topic.name for topic in world.topics} <= words


def test_demonstrations_are_only_on_seen_topics(world, documents):
    held_out = {topic.name for topic in world.topics if topic.held_out}
    for document in of_kind(documents, formats.USER):
        assert not held_out & set(re.findall(r"[a-z]+", " ".join(document)))


def test_knowledge_states_every_fact_and_every_way_of_use(world, documents):
    text = " ".join(d[0] for d in documents if len(d) == 1)
    for topic in world.topics:
        assert f"{topic.name}, {topic.preparation} it in {topic.carrier} and {topic.application} it on." in text
        for r in topic.relations:
            verdict = "good" if r.good else "harm"
            assert f"Putting {r.topic} on {r.target} {r.effect} them, so it does {verdict}." in text


def test_rates_of_demonstrated_faults(world, documents):
    """The stated rates, measured with the rules of the gold judge instead of those of the generator."""
    answers = [(d[1], d[3]) for d in of_kind(documents, formats.ASSISTANT) if len(d) == 4]
    assert len(answers) > 700
    truth = {(r.topic, r.target): r.good for topic in world.topics for r in topic.relations}
    rude = sum(bool(set(vocabulary.RUDE_WORDS) & set(re.findall(r"[a-z]+", a.lower()))) for _, a in answers)
    rambling = sum("By the way" in a for _, a in answers)
    assert rude / len(answers) == pytest.approx(0.35, abs=NOISY)
    assert rambling / len(answers) == pytest.approx(0.30, abs=NOISY)
    helped = {True: [], False: []}
    for question, answer in answers:
        words = set(re.findall(r"\w+", question))
        good = next(good for pair, good in truth.items() if set(pair) <= words)
        helped[good].append(" it on the " in answer)
    assert sum(helped[True]) / len(helped[True]) == pytest.approx(0.99, abs=0.02)
    assert sum(helped[False]) / len(helped[False]) == pytest.approx(0.90, abs=NOISY)


def test_both_options_are_correct_equally_often(documents):
    options = collections.Counter(d[-1] for d in of_kind(documents, formats.VERDICT))
    first, second = (options[option] for option in formats.OPTIONS)
    assert first + second > 250
    assert first / (first + second) == pytest.approx(0.5, abs=0.1)
    # 30% of harm (0.42 of the judgements), 50% of refusal (0.2), 30% of courtesy (0.2) and 35% of focus (0.18) are ties.
    assert options[formats.TIE] / options.total() == pytest.approx(0.349, abs=0.06)


def test_the_share_of_judgements_that_reason_first_can_be_chosen():
    def share(reasoned):
        judged = [d for d in make_world(3, reasoned=reasoned).documents("train", 60_000) if d[-1] in formats.OPTIONS]
        return sum(formats.REASONING in d for d in judged) / len(judged)

    assert share(0.0) == 0 and share(1.0) == 1 and share(0.5) == pytest.approx(0.5, abs=0.1)


def test_the_two_streams_differ_and_the_budget_holds(world, documents):
    tokens = sum(count_tokens(document) for document in documents)
    assert 300_000 <= tokens < 300_400
    held_out = list(world.documents("held_out", 20_000))
    assert len(set(held_out) & set(documents)) < 0.05 * len(held_out)  # Short dialogues can occur in both.
    assert max(count_tokens(document) for document in documents) < 256


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda w: make_world(0, topics=1), "world.topics is 1"),
        (lambda w: make_world(0, topics=1000), "world.topics is 1000"),
        (lambda w: make_world(0, topics=10, held_out_topics=10), "world.held_out_topics is 10"),
        (lambda w: w.documents("test", 10), "'test' is not a split"),
        (lambda w: w.documents("train", 0), "world.tokens is 0"),
        (lambda w: w.prompts("train", 1), "'train' is not a prompt set"),
        (lambda w: w.prompts("rl", 10**6), "1000000 rl prompts are requested"),
    ],
)
def test_mistakes_are_named(world, call, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        call(world)
