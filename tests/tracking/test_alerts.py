"""Alerts on metrics: which rows raise which alert, and that ordinary training raises none."""

from __future__ import annotations

import math
import random

import pytest

from jaxalign.tracking.alerts import alerts_of, stalled


def rl_rows(count, **changes):
    """Rows of RL that goes well: the score rises, the KL grows slowly. changes: functions of the step by name."""
    noise = random.Random(0)
    healthy = {"score": lambda n: min(1.0, n / 50) + noise.gauss(0, 0.1), "kl_k3": lambda n: 0.1 * n,
               "response_length": lambda n: 40 + noise.gauss(0, 2), "entropy": lambda n: 1.5 * 0.99**n,
               "effective_sample_share": lambda n: 0.9, "skipped": lambda n: 0.0}
    return [{"step": n, **{name: f(n) for name, f in (healthy | changes).items()}} for n in range(count)]


def test_ordinary_training_raises_no_alert():
    assert alerts_of(rl_rows(200)) == []
    assert alerts_of([{"step": n, "loss": 5 * 0.99**n, "grad_norm": 1.0, "skipped": 0.0} for n in range(300)]) == []


@pytest.mark.parametrize(("name", "metric", "values", "step", "says"), [
    ("not_finite", "score", lambda n: math.nan if n == 7 else 0.5, 7, "score is nan at step 7"),
    # Skips at steps 12, 15 and 18: the third is at step 18.
    ("skipped", "skipped", lambda n: float(n in (12, 15, 18)), 18, "3 of the last 19 steps"),
    # 1 nat, then 30: the mean of the last five first exceeds 10 nats and four times the mean before with two rows of 30.
    ("kl", "kl_k3", lambda n: 1.0 if n < 60 else 30.0, 61, "12.6 nats per response, from 1 "),
    ("length", "response_length", lambda n: 40.0 if n < 30 else 100.0, 36, "82 tokens on average, 40 at the start"),
    ("length", "response_length", lambda n: 40.0 if n < 30 else 0.0, 35, "16 tokens on average, 40 at the start"),
    # Ten times 0.04 are below a tenth of 1.
    ("entropy", "entropy", lambda n: 1.0 if n < 20 else 0.04, 29, "0.04 nats per token, from 1 at the start"),
    ("effective_samples", "effective_sample_share", lambda n: 0.2, 9, "20% of the samples"),
    # The means of three rows are 0.4, 0.53 and 0.67: the first above 0.5 is that of row 20.
    ("score_changed", "score_changed", lambda n: 0.4 if n < 20 else 0.8, 20, "53% of the responses of 3 iterations"),
    ("constant_score", "score_std", lambda n: 0.2 if n < 40 or n == 41 else 1e-8, 44, "have the same score, "),
    ("no_gradient", "grad_norm", lambda n: 0.0 if n in (3, 4) or n > 20 else 1.0, 23, "3 steps in a row is 0"),
])
def test_a_sign_of_trouble_raises_its_alert_at_the_row_that_shows_it(name, metric, values, step, says):
    raised = alerts_of(rl_rows(100, **{metric: values}))
    assert [alert.name for alert in raised] == [name]
    assert raised[0].step == step and says in raised[0].sentence and raised[0].remedy
    assert raised[0].text().endswith(".")


def test_a_score_that_loses_its_gain_raises_an_alert_and_noise_does_not():
    noise = random.Random(1)

    def rises_then_falls(n):
        return (n / 50 if n < 50 else 1 - (n - 50) / 50) + noise.gauss(0, 0.1)

    raised = alerts_of(rl_rows(120, score=rises_then_falls))
    assert [alert.name for alert in raised] == ["reward"]
    assert 70 <= raised[0].step <= 95  # Half of the gain is lost at step 75; the mean of ten rows shows it some steps later.
    assert alerts_of(rl_rows(150, score=lambda n: noise.gauss(0, 1))) == []


def losses(count, loss, **more):
    return [{"step": n, "loss": loss(n), **more} for n in range(count)]


@pytest.mark.parametrize(("count", "loss", "step", "says"), [
    # Stage sft with a learning rate of 10 on three pairs; (2.86 + 4499 + 1151) / 3 = 1884.3.
    (3, lambda n: (2.86, 4499.0, 1151.0)[n], 2, "the mean loss of 3 steps rose to 1884, from 2.86 at the first step"),
    # The start is 3. A loss of 8 from step 4 on has a mean of 10 steps of 6 in row 9, which is higher by less than three
    # standard deviations, 3 * sqrt(5^2 / (2 * 9)) = 3.54, and of (3 * 3 + 7 * 8) / 10 = 6.5 in row 10, where they are 3.35.
    (40, lambda n: 3.0 if n < 4 else 8.0, 10, "the mean loss of 10 steps rose to 6.5, from 3 in the first 3"),
    # DPO from log 2: the rows are 0.02 n higher. The mean over n - 9 to n is log 2 + 0.02 (n - 4.5), that of the first three
    # log 2 + 0.02: it is higher by more than 1 from n = 56 on.
    (100, lambda n: math.log(2) + 0.02 * n, 56, "from 0.7131 in the first 3"),
])
def test_a_loss_that_rises_far_above_its_start_raises_an_alert(count, loss, step, says):
    raised = alerts_of(losses(count, loss))
    assert [(alert.name, alert.step) for alert in raised] == [("loss", step)]
    assert says in raised[0].sentence and "lower optimizer.learning_rate" in raised[0].remedy


@pytest.mark.parametrize("start", [math.log(2), 2.9, 9.0])
def test_a_loss_with_the_noise_of_small_batches_raises_no_alert(start):
    for seed in range(20):
        noise = random.Random(seed)
        factors = [noise.lognormvariate(0, 0.4) for _ in range(200)]
        assert alerts_of([{"step": n, "loss": start * factor} for n, factor in enumerate(factors)]) == []
        assert alerts_of([{"step": n, "loss": start * 0.98**n * factor} for n, factor in enumerate(factors)]) == []


@pytest.mark.parametrize("metric", ["score", "reward", "kl", "policy_loss"])
def test_the_loss_of_rl_may_rise(metric):
    assert alerts_of(losses(100, lambda n: 0.1 * n, **{metric: 0.5})) == []


def test_a_skipped_update_that_the_loss_scale_explains_raises_no_alert():
    rows = [{"step": n, "loss": 1.0, "grad_norm": math.inf, "skipped": 1.0, "overflowed": 1.0} for n in range(30)]
    assert alerts_of(rows) == []


def test_a_process_without_a_finished_step_for_ten_usual_steps_has_stalled():
    assert stalled(119, 1.0) is None and stalled(121, 1.0) is not None  # Two minutes are the least.
    assert stalled(900, 100.0) is None
    alert = stalled(1001, 100.0)
    assert alert.sentence == "no step has ended for 1,001 s, and the median step takes 100 s"
    assert "resume" in alert.remedy and alert.name == "stall"
