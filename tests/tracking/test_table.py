"""The final table."""

from __future__ import annotations

from jaxalign.tracking import table


def _rate(count, total):
    return {"count": count, "total": total, "rate": count / total, "low": 0.0, "high": 1.0}


def test_table_has_models_as_columns_and_measures_in_a_fixed_order():
    summary = {
        "models": ["base", "sft", "ppo"],
        "rates": {"base": {"focused": _rate(10, 20), "harmful": _rate(156, 200)},
                  "sft": {"harmful": _rate(24, 200)}, "ppo": {"harmful": _rate(9, 200), "novel_axis": _rate(1, 3)}},
        "kl": {"base": None, "sft": 0.0, "ppo": 2.947}, "length": {"base": 24.06, "sft": 22.0, "ppo": 23.0},
        "preference_score": {}}
    assert table.render(summary, reference="sft").splitlines() == [
        "                              helpful-only (base)  after supervised CAI (sft)  after RL (ppo)",
        "---------------------------------------------------------------------------------------------",
        "Harmful help                      78.0% (156/200)              12.0% (24/200)    4.5% (9/200)",
        "Focused                             50.0% (10/20)                           -               -",
        "Novel axis                                      -                           -     33.3% (1/3)",
        "KL to sft, nats per response                    -                        0.00            2.95",
        "Length, tokens                               24.1                        22.0            23.0"]


def test_win_rates_against_the_base_have_intervals():
    def won(model, against, rate, low, high):
        return {"model": model, "against": against, "wins": 9, "total": 128, "undecided": 9, "rate": rate, "low": low,
                "high": high}

    wins = [won("sft", "base", 0.629, 0.543, 0.708), won("ppo", "base", 0.25, 0.183, 0.332), won("ppo", "sft", 0.9, 0.8, 0.95)]
    *_, row = table.render({"models": ["base", "sft", "ppo"], "rates": {}, "win_rates": wins}).splitlines()
    assert row.split("  ")[0] == "Win rate against base, n=128 (95% interval)"
    assert row.split()[7:] == ["-", "62.9%", "(54.3", "to", "70.8)", "25.0%", "(18.3", "to", "33.2)"]


def test_models_are_named_for_a_run_without_critique_or_pretraining():
    first, *_ = table.render({"models": ["base", "sft", "other"], "rates": {}}, stages=("sft", "ppo")).splitlines()
    assert first.split("  ") == ["", "starting model (base)", "after fine-tuning (sft)", "other"]


def test_empty_summary_is_no_error():
    assert table.render({}) == ""


def test_a_zero_has_no_sign():
    text = table.render({"models": ["base", "sft"], "rates": {}, "kl": {"base": 1.5, "sft": -1e-8}})
    assert "-0.00" not in text and "0.00" in text


def test_scores_by_the_callable_reward_of_the_run_are_shown():
    text = table.render({"models": ["base", "ppo"], "rates": {}, "reward": {"base": 0.136, "ppo": 0.2384}})
    assert text.splitlines()[-1].split() == ["Score", "by", "reward.callable", "0.136", "0.238"]
