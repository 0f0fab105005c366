"""Answers during RL on the report, from the files of the alarms."""

from __future__ import annotations

from .pages import render_page
from .synthetic import make_run, write_rows


def test_answers_before_during_and_at_the_newest_measurement_are_side_by_side(tmp_path):
    make_run(tmp_path)
    assert "samples" not in render_page(tmp_path)[1].sections  # The alarms are off by default.
    for iteration in (0, 10, 20, 30, 40, 50):
        write_rows(tmp_path / "ppo" / f"alarm-answers-{iteration}.jsonl", [
            {"prompt_id": f"p{n}", "messages": [{"role": "user", "content": f"question <{n}>"}], "complete": n != 1,
             "response": f"answer {n} of {iteration}", "score": iteration / 100} for n in range(6)])
    source, page = render_page(tmp_path)
    text = page.text("samples")
    places = [text.index(f"answer 0 of {iteration} score") for iteration in (0, 20, 30, 50)]
    assert places == sorted(places) and "answer 0 of 10 " not in text and "before RL" in text and "iteration 50" in text
    assert "score 0.50 cut off" in text and "question <3>" in text and "question <4>" not in text
    assert 'href="#samples"' in source and "question &lt;0&gt;" in source
