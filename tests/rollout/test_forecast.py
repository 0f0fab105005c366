"""The programs of a queue are predicted before it runs and compiled in threads."""

from __future__ import annotations

import dataclasses
import logging
import threading
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import pytest

from jaxalign.parallel.ahead import Ahead
from jaxalign.rollout import forecast as module
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from jaxalign.rollout.session import Session
from tests import tiny
from tests.compilations import SEEN, compiled

KEY = jax.random.key(0)
ENDLESS = Sampling(40, ())
SHORT = [[1, 4 + i] for i in range(5)]
MIXED = [[1, *range(3, 3 + n)] for n in (1, 1, 2, 5, 5, 9, 9, 9, 17, 20, 3, 3)] + [[1, 4]] * 3


@pytest.fixture
def called(monkeypatch) -> list:
    """The programs that sessions call, each recorded once."""
    found, call = [], Session.call

    def record(self, step, *arguments):
        key = module._key(step, module._described(arguments))
        if key not in found:
            found.append(key)
        return call(self, step, *arguments)

    monkeypatch.setattr(Session, "call", record)
    return found


def finish(session: Session):
    while session.unfinished:
        session.step()


@pytest.mark.medium
@pytest.mark.variants(3)
@pytest.mark.parametrize(("prompts", "batch", "mesh"), [(SHORT, 4, None), (MIXED, 8, (2, 2, 2)), (MIXED, 16, None)])
def test_without_stop_ids_the_forecast_is_exact(called, prompts, batch, mesh):
    model = tiny.model(mesh)
    params = tiny.place(model, tiny.host_params())
    session = Engine(model, batch, 64, 8).start(params, prompts, KEY, ENDLESS, range(len(prompts)))
    expected = [module._key(*program) for program in module.forecast(session)]
    assert called == [] and session.unfinished == len(prompts)
    finish(session)
    assert called == expected


def test_weights_that_no_device_was_chosen_for_are_predicted_too(called):
    params = jax.tree.map(jnp.asarray, tiny.host_params())
    assert not any(x.committed for x in jax.tree.leaves(params))
    session = Engine(tiny.model(), 4, 64, 8).start(params, SHORT, KEY, ENDLESS, range(len(SHORT)))
    expected = [module._key(*program) for program in module.forecast(session)]
    finish(session)
    assert called == expected


def test_abstract_weights_give_the_same_forecast():
    model = tiny.model()
    params = tiny.place(model, tiny.host_params())
    engine = Engine(model, 4, 64, 8)
    abstract = module.forecast(engine.start(module._described(params), MIXED, KEY, ENDLESS, range(len(MIXED))))
    real = module.forecast(engine.start(params, MIXED, KEY, ENDLESS, range(len(MIXED))))
    assert [module._key(*program) for program in abstract] == [module._key(*program) for program in real]


def test_with_stop_ids_most_programs_are_predicted_and_few_of_them_are_unused(called, monkeypatch):
    monkeypatch.setattr(module, "SHRINKING", ("cpu",))
    model, sampling = tiny.model(), Sampling(40, tiny.STOPS)
    params = tiny.place(model, tiny.host_params(scale=1.5))
    prompts = MIXED * 6
    session = Engine(model, 16, 64, 8).start(params, prompts, KEY, sampling, range(len(prompts)))
    foreseen = [module._key(*program) for program in module.forecast(session)]
    finish(session)
    assert foreseen[:3] == called[:3]
    assert len(set(called) & set(foreseen)) >= 0.8 * len(called)
    assert len(set(foreseen) - set(called)) <= 0.4 * len(foreseen)


def test_on_a_cpu_no_programs_of_fewer_rows_are_predicted_unless_they_are_certain(monkeypatch):
    """Without stop tokens all lengths are known."""
    model, prompts = tiny.model(), MIXED * 6
    params = tiny.place(model, tiny.host_params())

    def foreseen(sampling: Sampling) -> list[tuple]:
        session = Engine(model, 16, 64, 8).start(params, prompts, KEY, sampling, range(len(prompts)))
        return [module._key(*program) for program in module.forecast(session)]

    some, certain = foreseen(Sampling(40, tiny.STOPS)), foreseen(ENDLESS)
    monkeypatch.setattr(module, "SHRINKING", ("cpu",))
    every = foreseen(Sampling(40, tiny.STOPS))
    assert some == every[: len(some)] and len(some) < len(every) and certain == foreseen(ENDLESS)


@pytest.mark.parametrize("copies", [1, 4])
def test_a_few_waves_of_a_long_queue_predict_almost_the_same_programs(monkeypatch, copies):
    model = tiny.model()
    params = tiny.place(model, tiny.host_params())
    prompts = [[1, 3 + i % 29, 3 + i // 29, *range(3, 3 + i % 3 * 7)] for i in range(384 // copies) for _ in range(copies)]
    session, played = Engine(model, 16, 64, 8).start(params, prompts, KEY, ENDLESS, range(len(prompts))), []
    enqueue = Session.enqueue
    monkeypatch.setattr(Session, "enqueue", lambda self, rows: (played.append(len(rows)), enqueue(self, rows)))
    some = {module._key(*program) for program in module.forecast(session)}
    monkeypatch.setattr(module, "WAVES", 1000)
    every = {module._key(*program) for program in module.forecast(session)}
    assert played == [4 * 16, 384]
    assert len(every - some) <= 2 and len(some - every) <= 2  # A prefill of another size and its insert may differ.


def test_a_forecast_has_a_limited_number_of_steps(monkeypatch):
    model, steps = tiny.model(), []
    params = tiny.place(model, tiny.host_params())
    session = Engine(model, 16, 1 << 20, 8).start(params, MIXED, KEY, Sampling(1 << 19, tiny.STOPS), range(len(MIXED)))
    step = Session.step
    monkeypatch.setattr(Session, "step", lambda self: (steps.append(1), step(self))[1])
    assert {program.__name__ for program, _ in module.forecast(session)} == {"prefill", "insert", "decode_chunk", "reroll"}
    assert len(steps) == module.CHUNKS


def test_the_programs_of_two_tiers_are_predicted_for_a_mesh(called):
    """Rows of at most 300 tokens, 8 in each batch shard."""
    model, sampling = tiny.model((2, 2, 2)), Sampling(300, tiny.STOPS)
    params = tiny.place(model, tiny.host_params())  # Almost never stops; the first test covers that case exactly.
    session = Engine(model, 32, 512, 8).start(params, MIXED * 4, KEY, sampling, range(4 * len(MIXED)))
    foreseen = [module._key(*program) for program in module.forecast(session)]
    for _ in range(12):
        session.step()
    assert {"exchange", "decode_chunk"} <= {step.__name__ for step, *_ in foreseen}
    tiers = [key for key in called if key[0].__name__ in ("exchange", "decode_chunk")]
    assert len(set(tiers) & set(foreseen)) >= 0.7 * len(tiers)


def test_programs_whose_compilation_never_started_are_submitted_again(monkeypatch):
    model = tiny.model()
    params = tiny.place(model, tiny.host_params())
    session = Engine(model, 8, 64, 8).start(params, MIXED, KEY, ENDLESS, range(len(MIXED)))
    wanted, submitted = len(module.forecast(session)), []
    gate = threading.Event()
    add = Ahead.add
    monkeypatch.setattr(Ahead, "add", lambda self, *program: (submitted.append(program), add(self, *program))[1])
    module.forget()
    for _ in range(2):
        with Ahead(1) as ahead:
            ahead._pool.submit(gate.wait)
            module.compile_ahead(ahead, session)
        assert len(submitted) == wanted
        submitted.clear()
    gate.set()


def test_queues_of_one_and_of_many_prompts_have_separate_forecasts(monkeypatch):
    model, asked = tiny.model(), []
    params = tiny.place(model, tiny.host_params())
    monkeypatch.setattr(Ahead, "add", lambda self, step, arguments: (asked.append(step.__name__), Future())[1])
    module.forget()
    for count in (1, 15, 15):
        session = Engine(model, 16, 64, 8).start(params, (MIXED * 2)[:count], KEY, ENDLESS, range(count))
        with Ahead() as ahead:
            module.compile_ahead(ahead, session)
        asked.append("next")
    first, second, third = (part.split() for part in " ".join(asked).split("next")[:-1])
    assert set(first) == {"prefill", "insert", "decode_chunk"} and "decode_chunk" in second
    assert third == []


@pytest.mark.slow
def test_the_queue_uses_the_programs_compiled_in_threads_for_a_mesh(monkeypatch):
    add = Ahead.add

    def add_and_wait(self, *program):
        future = add(self, *program)
        assert future.result() is not None
        return future

    monkeypatch.setattr(Ahead, "add", add_and_wait)
    model = tiny.model((2, 2, 2), embed=24)
    params = tiny.place(model, model.init(jax.random.key(0)))
    jax.clear_caches()
    module.forget()
    SEEN.clear()
    tiny.respond(Engine(model, 8, 64, 8), params, MIXED, KEY, ENDLESS, range(len(MIXED)))
    found = [compiled(f"({name})") for name in ("prefill", "insert", "reroll", "decode_chunk", "exchange")]
    assert all(found[i] for i in (0, 1, 3))
    assert {thread.partition("_")[0] for threads in found for thread in threads} == {"compile"}


@pytest.mark.medium
def test_a_known_queue_is_not_forecast_again(monkeypatch):
    model = tiny.model()
    params = tiny.place(model, tiny.host_params())
    engine, forecasts = Engine(model, 8, 64, 8), []
    module.forget()
    forecast = module.forecast
    monkeypatch.setattr(module, "forecast", lambda session: (forecasts.append(session), forecast(session))[1])
    for _ in range(3):
        tiny.respond(engine, params, MIXED, KEY, ENDLESS, range(len(MIXED)))
    assert len(forecasts) == 1
    tiny.respond(dataclasses.replace(engine, batch=4), params, MIXED, KEY, ENDLESS, range(len(MIXED)))
    assert len(forecasts) == 2


def test_a_queue_whose_forecast_fails_is_answered_with_a_warning(monkeypatch, caplog):
    model = tiny.model()
    params = tiny.place(model, tiny.host_params())
    engine = Engine(model, 8, 64, 8)
    expected = tiny.respond(engine, params, SHORT, KEY, ENDLESS, range(5))
    module.forget()
    monkeypatch.setattr(module._Played, "_drawn", lambda self, control: 1 / 0)
    with caplog.at_level(logging.WARNING, logger="jaxalign"):
        assert tiny.respond(engine, params, SHORT, KEY, ENDLESS, range(5)) == expected
    assert "sampling could not be compiled ahead;" in caplog.text and "division" in caplog.text


@pytest.mark.medium
def test_released_programs_are_compiled_again():
    """The second queue compiles nothing, the third everything."""
    model = tiny.model(embed=24)
    params, counts = tiny.place(model, model.init(jax.random.key(0))), []
    for release in (True, False, True):
        if release:
            module.release_programs()
        SEEN.clear()
        tiny.respond(Engine(model, 2, 64, 8), params, [[1, 7]] * 2, KEY, ENDLESS, range(2))
        counts.append([len(compiled(f"({name})")) for name in ("prefill", "insert", "decode_chunk")])
    first, second, third = counts
    assert first == third and min(first) > 0 and second == [0, 0, 0]
