"""The page of a sheet in a real browser, with keys only, from the first pair to the report."""

from __future__ import annotations

import json

import pytest

from jaxalign import ratings
from tests.browser import PROGRAM, Browser

from .synthetic import make_run, write_rows

pytestmark = [pytest.mark.process, pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed")]

HOSTILE = "Ends </script><script>document.title = 'x'</script><!-- <img src=x onerror=\"document.title = 'x'\"> \u2028&amp;"


@pytest.fixture
def sheet(tmp_path, capsys):
    """A sheet of six pairs of base and ppo; the answer of ppo to e-2 is hostile, that of base to e-3 is empty."""
    run, prompt = make_run(tmp_path / "run", gold=False), [{"role": "user", "content": HOSTILE}]
    special = {("ppo", 2): HOSTILE, ("base", 3): ""}
    write_rows(run / "evaluate" / "rows-00000.jsonl", [
        {"model": model, "prompt_id": f"e-{i}", "kind": None, "gold": None, "messages": prompt, "complete": True, "tokens": 1,
         "kl": 0.0, "response": special.get((model, i), f"{word} {i}")}
        for model, word in (("base", "rude"), ("ppo", "kind")) for i in range(6)])
    assert ratings.main(["ratings", "export", str(run), f"--out={tmp_path / 'sheet'}"]) == 0
    capsys.readouterr()
    return tmp_path / "sheet"


def shown(browser: Browser, place: str) -> str:
    return browser.evaluate(f"document.querySelector('{place}').innerText")


def test_keys_rate_all_pairs_and_save_a_file_that_is_imported(sheet, tmp_path, capsys):
    pairs = json.loads((sheet / "key.json").read_text())["pairs"]
    lines = [json.loads(line) for line in (sheet / "sheet.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    with Browser(tmp_path) as browser:
        browser.open(sheet / "sheet.html")
        assert shown(browser, "#count") == "Pair 1 of 6 · 0 rated"
        for key in ("1", "2", "=", "Backspace", "ArrowLeft", "2"):  # A tie, then back to the second pair, rated 2 again.
            browser.press(key)
        assert shown(browser, "#count") == "Pair 3 of 6 · 3 rated"
        browser.call("Page.reload")
        browser.wait("document.readyState === 'complete' && document.getElementById('count').innerText !== ''")
        assert shown(browser, "#count") == "Pair 3 of 6 · 3 rated"
        assert browser.evaluate("document.getElementById('choice0').ariaPressed") == "true"
        for pair, row in zip(pairs[2:], lines[2:], strict=True):
            assert shown(browser, "#prompt .said").split() == HOSTILE.split()
            for side in (1, 2):
                texts = shown(browser, f"#answer{side} .said"), row[f"answer_{side}"] or "(nothing)"
                assert texts[0].split() == texts[1].split()
            browser.press("1" if pair["first"] == "ppo" else "2")
        assert shown(browser, "#donetitle") == "All 6 pairs are rated"
        browser.evaluate("document.getElementById('name').focus()")
        for key in "Ann 1":  # The keys of ratings are text in the field of the name.
            browser.press(key)
        for key in ("Tab", "Tab", "s"):
            browser.press(key)
        saved = browser.downloaded()
        assert browser.evaluate("document.title") == "Which answer is better?" and browser.errors == []
    capsys.readouterr()
    workdir = tmp_path / "run"
    assert ratings.main(["ratings", "import", str(workdir), f"--key={sheet / 'key.json'}", f"--ratings={saved}"]) == 0
    assert "Ann 1 rated 6 pairs" in capsys.readouterr().out
    stored = json.loads(next((workdir / "ratings").iterdir()).read_text())
    assert [pair["rating"] for pair in stored["pairs"]] == [1, 2, *(1 if pair["first"] == "ppo" else 2 for pair in pairs[2:])]


def test_a_click_rates_and_a_skipped_pair_stays_open(sheet, tmp_path):
    with Browser(tmp_path) as browser:
        browser.open(sheet / "sheet.html")
        browser.press("ArrowRight")
        for _ in range(5):
            browser.evaluate("document.getElementById('answer2').click()")
        assert shown(browser, "#donetitle") == "5 of 6 pairs are rated"
        browser.evaluate("document.getElementById('open').click()")
        assert shown(browser, "#count") == "Pair 1 of 6 · 5 rated"
        browser.press("S")
        saved = json.loads(browser.downloaded().read_text())
    assert [row["rating"] for row in saved["ratings"]] == [None, 2, 2, 2, 2, 2] and saved["rater"] == ""
