"""Blind sheets of answers, the import of ratings, and the section of the report."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil

import pytest

from jaxalign import ratings
from jaxalign.tracking.ratings.measures import agreement, judge_outcomes, majority, score_outcomes, win_rate
from jaxalign.tracking.report.page import render_report
from jaxalign.tracking.workdir import read_run

from .pages import Page
from .synthetic import make_run, write_rows

HOSTILE = "Ends </script><script>x()</script> <!-- & \u2028 \"quoted\", 'so';\nand = 1"


def rows_of(model: str, count: int = 30) -> list[dict]:
    """The rows of stage evaluate of one model. The answers to prompt 3 are equal; those to prompt 5 look like a formula."""
    texts = {3: "equal", 5: f"={model}()", 7: HOSTILE if model == "ppo" else ""}
    words = {"base": "rude", "sft": "kind", "ppo": "short"}
    system = {"role": "system", "content": "Be brief."}
    return [{"model": model, "prompt_id": f"e-{i}", "kind": None, "gold": None, "complete": True, "tokens": 5, "kl": 0.0,
             "messages": [system] * (i % 2) + [{"role": "user", "content": f"Question {i}?"}],
             "response": texts.get(i, f"A {words[model]} answer, number {i}."),
             "score": i * (1.0 if model == "ppo" else 0.5)} for i in range(count)]


@pytest.fixture
def run(tmp_path):
    """A finished run of base, sft and ppo with 30 prompts, the scores of a preference model and the verdicts of the judge."""
    path = make_run(tmp_path / "run", gold=False)
    rows = [row | ({"response": "=sum()"} if row["prompt_id"] == "e-5" and row["model"] == "sft" else {})
            for model in ("base", "sft", "ppo") for row in rows_of(model)]
    write_rows(path / "evaluate" / "rows-00000.jsonl", rows)
    write_rows(path / "evaluate" / "win_rates.jsonl", [
        {"prompt_id": f"e-{i}", "model": "ppo", "against": "base", "label": 0.9, "decided": i % 2 == 0} for i in range(30)])
    return path


def called(capsys, *arguments) -> tuple[int, str, str]:
    code = ratings.main(["ratings", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def exported(capsys, run, folder, *more):
    code, _, problem = called(capsys, "export", run, f"--out={folder}", *more)
    assert (code, problem) == (0, "")
    return folder


def key_of(sheet) -> dict:
    return json.loads((sheet / "key.json").read_text())


def cells_of(sheet) -> list[dict]:
    return list(csv.DictReader(io.StringIO((sheet / "sheet.csv").read_bytes().decode("utf-8-sig"), newline="")))


def lines_of(sheet) -> list[dict]:
    return [json.loads(line) for line in (sheet / "sheet.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]


def choices(sheet, better="ppo") -> dict[str, int]:
    """For each pair of the sheet the rating that prefers one model; a tie for every fourth pair."""
    pairs = key_of(sheet)["pairs"]
    return {pair["id"]: 0 if i % 4 == 3 else 1 if pair["first"] == better else 2 for i, pair in enumerate(pairs)}


def filled_csv(sheet, chosen, delimiter=",", encoding="utf-8-sig") -> bytes:
    file, rows = io.StringIO(newline=""), cells_of(sheet)
    writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(row | {"rating": chosen.get(row["id"], "")} for row in rows)
    return file.getvalue().encode(encoding)


def filled_jsonl(sheet, chosen) -> bytes:
    return "".join(json.dumps(row | {"rating": chosen.get(row["id"])}) + "\n" for row in lines_of(sheet)).encode()


def filled_page(sheet, chosen, rater="") -> bytes:
    key = key_of(sheet)
    rows = [{"id": pair["id"], "rating": chosen.get(pair["id"])} for pair in key["pairs"]]
    return json.dumps({"sheet": key["sheet"], "rater": rater, "ratings": rows}, indent=1).encode()


def imported(capsys, run, sheet, content: bytes, *more) -> tuple[int, str, str]:
    path = sheet / "filled"
    path.write_bytes(content)
    return called(capsys, "import", run, f"--key={sheet / 'key.json'}", f"--ratings={path}", *more)


def page_of(run) -> Page:
    return Page(render_report(run).read_text(encoding="utf-8"))


def test_no_form_of_the_sheet_names_a_model(capsys, run, tmp_path):
    sheet = exported(capsys, run, tmp_path / "sheet", "--models=sft,ppo")
    for name in ("sheet.html", "sheet.csv", "sheet.jsonl"):
        shown = (sheet / name).read_text(encoding="utf-8").replace("=ppo()", "")  # That answer names its model itself.
        assert not re.search(r"\b(base|sft|ppo|dpo|RL|fine-tuning|e-\d+)\b", shown), name
    assert key_of(sheet)["models"] == ["sft", "ppo"]


def test_the_answers_are_in_random_order_and_the_key_tells_the_order(capsys, run, tmp_path):
    sheet = exported(capsys, run, tmp_path / "sheet")
    texts = {(row["model"], row["prompt_id"]): row["response"] for model in ("base", "ppo") for row in rows_of(model)}
    pairs, first = key_of(sheet)["pairs"], []
    for pair, row in zip(pairs, lines_of(sheet), strict=True):
        assert row["id"] == pair["id"] and row["answer_1"] == texts[pair["first"], pair["prompt_id"]]
        assert row["answer_2"] == texts[pair["second"], pair["prompt_id"]] and row["rating"] is None
        first.append(pair["first"])
    # A fair coin gives fewer than 5 or more than 24 heads of 29 with a probability of 0.0001.
    assert len(pairs) == 29 and 5 <= first.count("ppo") <= 24
    assert "e-3" not in {pair["prompt_id"] for pair in pairs}  # Its answers are equal.
    assert [pair["prompt_id"] for pair in pairs] != sorted((pair["prompt_id"] for pair in pairs), key=lambda p: int(p[2:]))


def test_the_same_seed_gives_the_same_files_and_another_seed_others(capsys, run, tmp_path):
    one, same, other, more = (exported(capsys, run, tmp_path / name, f"--pairs={count}", f"--seed={seed}")
                              for name, count, seed in (("a", 8, 4), ("b", 8, 4), ("c", 8, 5), ("d", 20, 4)))
    files = ("sheet.html", "sheet.csv", "sheet.jsonl", "key.json")
    assert sorted(path.name for path in one.iterdir()) == sorted(files)
    assert all((one / name).read_bytes() == (same / name).read_bytes() for name in files)
    assert key_of(one)["pairs"] != key_of(other)["pairs"] and key_of(one)["pairs"] == key_of(more)["pairs"][:8]


def test_a_second_export_keeps_ratings_and_refuses_the_folder_of_another_sheet(capsys, run, tmp_path):
    sheet = exported(capsys, run, tmp_path / "sheet", "--pairs=8")
    (sheet / "sheet.csv").write_bytes(content := filled_csv(sheet, choices(sheet)))
    exported(capsys, run, sheet, "--pairs=8")
    assert (sheet / "sheet.csv").read_bytes() == content
    code, _, problem = called(capsys, "export", run, f"--out={sheet}", "--pairs=9")
    assert code == 2 and problem == f"{sheet} has sheet.html of another sheet; give another folder as --out\n"


def test_a_spreadsheet_takes_no_answer_for_a_formula(capsys, run, tmp_path):
    cells = cells_of(exported(capsys, run, tmp_path / "sheet"))
    texts = [row[name] for row in cells for name in ("prompt", "answer_1", "answer_2")]
    assert "'=ppo()" in texts and not any(text.startswith(("=", "+", "-", "@")) for text in texts)
    assert not any(re.fullmatch(r"[\d.]+e?\d*", row[name]) for row in cells for name in ("sheet", "id"))


@pytest.mark.parametrize("form", [
    filled_csv, filled_jsonl, filled_page, lambda sheet, chosen: filled_csv(sheet, chosen, ";", "utf-8"),
    lambda sheet, chosen: filled_csv(sheet, {name: rating or "=" for name, rating in chosen.items()}, "\t"),
], ids=["csv", "jsonl", "page", "semicolons", "tabs"])
def test_every_form_is_read_with_the_same_result(capsys, run, tmp_path, form):
    """Of 29 pairs, 7 are ties: 22 wins and 7 halves are 25.5 / 29 = 87.9%."""
    sheet = exported(capsys, run, tmp_path / "sheet")
    code, shown, problem = imported(capsys, run, sheet, form(sheet, choices(sheet)), "--rater=Ann")
    assert (code, problem) == (0, "") and "win rate of 87.9%" in shown
    assert "more than noise: people find its answers better" in shown
    stored = json.loads(next((run / "ratings").iterdir()).read_text())
    assert stored["rater"] == "Ann" and stored["sheet"] == key_of(sheet)["sheet"]
    assert {pair["id"]: pair["rating"] for pair in stored["pairs"]} == choices(sheet)


def test_the_page_names_the_rater_and_a_second_import_replaces_the_first(capsys, run, tmp_path):
    sheet = exported(capsys, run, tmp_path / "sheet", "--pairs=5")
    first, second = choices(sheet), choices(sheet, better="base")
    assert "written to" in imported(capsys, run, sheet, filled_page(sheet, first, " Ann B. "))[1]
    shown = imported(capsys, run, sheet, filled_page(sheet, second, "Ann B."))[1]
    assert "replaced" in shown and "win rate of 10.0%" in shown
    imported(capsys, run, sheet, filled_page(sheet, first, "Ann B."), "--rater=Bo")
    assert sorted(path.name.rpartition("-")[0] for path in (run / "ratings").iterdir()) == ["Ann B.", "Bo"]


def test_unrated_pairs_are_counted_and_left_out(capsys, run, tmp_path):
    sheet = exported(capsys, run, tmp_path / "sheet", "--pairs=8")
    chosen = dict(list(choices(sheet).items())[:3])
    shown = imported(capsys, run, sheet, filled_csv(sheet, chosen), "--rater=Ann")[1]
    assert "Ann rated 3 pairs" in shown and "Pairs without a rating: 5 of 8." in shown


def spoiled(sheet) -> dict[str, tuple[bytes, str]]:
    """Damaged files by name, each with a part of the sentence about it."""
    chosen = choices(sheet)
    ids = list(chosen)
    page, lines, cells = filled_page(sheet, chosen), filled_jsonl(sheet, chosen), filled_csv(sheet, chosen)
    return {
        "unknown id": (page.replace(ids[2].encode(), b"p00000000000"), "rating 3 has the id 'p00000000000', which is not"),
        "double id": (lines.replace(ids[2].encode(), ids[1].encode()), f"line 3 has the id '{ids[1]}' a second time"),
        "no rating": (filled_csv(sheet, chosen | {ids[0]: 3}), "has the rating '3'; 1 or 2 for the better answer, 0 or ="),
        "true": (filled_jsonl(sheet, chosen | {ids[0]: True}), "line 1 has the rating True"),
        "float": (filled_jsonl(sheet, chosen | {ids[0]: 1.5}), "line 1 has the rating 1.5"),
        "empty": (filled_csv(sheet, {}), "has no rating; each pair is rated 1, 2, or 0 for a tie"),
        "cut page": (page[:-40], "is no JSON object, so the file is cut short or damaged"),
        "cut line": (lines[:-9], "line 6 is no JSON object, so the file is cut short or damaged"),
        "cut rows": (b"".join(lines.splitlines(True)[:4]), "has 4 of the sheet's 6 pairs, so it is cut short"),
        "cut cells": (cells[: cells.rindex(b",", 0, -10)], "so the file is cut short or damaged"),
        "another sheet": (page.replace(b'"sheet": "s', b'"sheet": "sx'), "rating 1 belongs to the sheet 'sx"),
        "not text": (b"\xff\xfe\x00", "is not UTF-8 text"),
        "other columns": (b"id,rating\n1,2\n", "has no column 'sheet'"),
        "nothing": (b"", "has no column 'sheet'"),
        "list": (b'{"ratings": 3}', "has another form than the file of the page"),
    }


@pytest.mark.parametrize("name", [
    "unknown id", "double id", "no rating", "true", "float", "empty", "cut page", "cut line", "cut rows", "cut cells",
    "another sheet", "not text", "other columns", "nothing", "list"])
def test_a_wrong_file_is_refused_in_one_sentence(capsys, run, tmp_path, name):
    sheet = exported(capsys, run, tmp_path / "sheet", "--pairs=6")
    content, sentence = spoiled(sheet)[name]
    code, shown, problem = imported(capsys, run, sheet, content, "--rater=Ann")
    assert code == 2 and shown == "" and problem.count("\n") == 1
    assert problem.startswith(str(sheet / "filled")) and sentence in problem
    assert not (run / "ratings").exists()


def test_a_sheet_of_another_run_is_refused(capsys, run, tmp_path):
    sheet = exported(capsys, run, tmp_path / "sheet", "--pairs=6")
    other = shutil.copytree(run, tmp_path / "other")
    write_rows(other / "evaluate" / "rows-00000.jsonl", [row | {"response": row["response"] + "!"} for model in ("base", "ppo")
                                                        for row in rows_of(model)])
    code, _, problem = imported(capsys, other, sheet, filled_page(sheet, choices(sheet), "Ann"))
    assert code == 2 and f"is the key of a sheet of another run than {other}, or stage evaluate has written" in problem


@pytest.mark.parametrize(("arguments", "sentence"), [
    ([], "the first argument is ''; export or import is expected"),
    (["export", "RUN"], "--out is missing; ratings export needs it (--help)"),
    (["export", "RUN", "--out=OUT", "--pairs=0"], "--pairs is '0'; a whole number of at least 1 is expected"),
    (["export", "RUN", "--out=OUT", "--models=base,xyz"], "--models names 'xyz', which stage evaluate has not answered "
                                                          "with; its models are base, sft, ppo"),
    (["export", "RUN", "--out=OUT", "--models=base"],
     "--models is 'base'; two different models are expected, such as base,ppo"),
    (["export", "RUN", "--key=x"], "--key is not a flag of ratings export; --help lists them"),
    (["import", "RUN", "--key=KEY", "--ratings"], "--ratings has no value; set it as --ratings=VALUE"),
    (["import", "RUN", "--key=KEY", "--ratings=x"], "KEY does not exist; give the key.json of the sheet as --key"),
    (["import", "a", "b", "--key=KEY"], "2 work directories are given; one is expected, such as runs/NAME"),
])
def test_a_mistake_in_the_arguments_is_one_sentence(capsys, run, tmp_path, arguments, sentence):
    words = {"RUN": str(run), "--out=OUT": f"--out={tmp_path / 'out'}"}
    code, shown, problem = called(capsys, *(words.get(argument, argument) for argument in arguments))
    assert (code, shown, problem) == (2, "", f"{sentence}\n") and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../x", ".hidden", "", "a/b", "x" * 41])
def test_a_rater_needs_a_name_that_is_a_file_name(capsys, run, tmp_path, name):
    sheet = exported(capsys, run, tmp_path / "sheet", "--pairs=6")
    code, _, problem = imported(capsys, run, sheet, filled_page(sheet, choices(sheet), name))
    assert code == 2 and "--rater=NAME" in problem and not (run / "ratings").exists()


def test_the_win_rate_has_wilsons_interval():
    """81 of 263 is the first example of Newcombe (1998), with 0.2553 to 0.3662 by method 3. For 13 wins, 1 tie and 6 losses:
    (0.675 + 3.8415/40) / 1.19207 = 0.6468, plus or minus 1.959964 sqrt(0.675 * 0.325/20 + 3.8415/1600) / 1.19207 = 0.1901."""
    rate = win_rate([{f"p{i}": "later" if i < 81 else "earlier" for i in range(263)}], "later")
    assert (rate.low, rate.high) == (pytest.approx(0.2553, abs=5e-5), pytest.approx(0.3662, abs=5e-5))
    rate = win_rate([{f"p{i}": "later" if i < 13 else None if i == 13 else "earlier" for i in range(20)}], "later")
    assert (rate.value, rate.low, rate.high) == tuple(pytest.approx(x, abs=2e-4) for x in (0.675, 0.4567, 0.8369))


def test_a_pair_counts_once_with_the_mean_of_its_raters():
    """Repeating the ratings of 20 pairs by 10 people does not narrow the interval."""
    own = {f"p{i}": "later" if i < 14 else "earlier" for i in range(20)}
    assert win_rate([own] * 10, "later") == win_rate([own], "later")
    both = win_rate([{"a": "later", "b": "later"}, {"a": None, "c": "earlier"}], "later")  # (0.75 + 1 + 0) / 3
    assert both.total == 3 and both.value == pytest.approx(1.75 / 3)
    assert majority([{"a": "x", "b": "x"}, {"a": "y", "b": None}, {"a": "x", "b": None}, {"c": None}]) == {
        "a": "x", "b": "x", "c": None}
    assert majority([{"a": "x"}, {"a": "y"}]) == {"a": None}


def test_kappa_of_three_outcomes():
    """70 of 100 agree, by chance 0.5 * 0.6 + 0.3 * 0.3 + 0.2 * 0.1 = 0.41, so kappa is 0.29 / 0.59 = 0.492. Without ties, 64 of
    76 agree. Cohen's standard error is sqrt(0.7 * 0.3 / (100 * 0.59^2)) = 0.078, so the interval is about 0.34 to 0.64."""
    counts = {("x", "x"): 44, ("x", "y"): 5, ("x", None): 1, ("y", "x"): 7, ("y", "y"): 20, ("y", None): 3, (None, "x"): 9,
              (None, "y"): 5, (None, None): 6}
    cases = [outcomes for outcomes, count in counts.items() for _ in range(count)]
    first, second = ({str(i): pair[side] for i, pair in enumerate(cases)} for side in (0, 1))
    agreed = agreement(first, second | {"other": "x"})
    assert (agreed.same.count, agreed.same.total, agreed.decided.count, agreed.decided.total) == (70, 100, 64, 76)
    assert agreed.kappa.value == pytest.approx(0.492, abs=5e-4)
    assert agreed.kappa.low == pytest.approx(0.34, abs=0.03) and agreed.kappa.high == pytest.approx(0.64, abs=0.03)
    assert agreement({"a": "x"}, {"b": "x"}) is None and agreement({"a": "x"}, {"a": "x"}).kappa is None


def test_the_outcomes_of_the_judge_and_of_the_scores(run):
    verdicts = [{"prompt_id": str(i), "model": "ppo", "against": "base"} | rest for i, rest in enumerate([
        {"label": 0.8, "decided": True}, {"label": 0.2, "decided": True}, {"label": 0.5, "decided": False},
        {"label": 0.5, "decided": False, "problem": "refused"}])]
    verdicts.append({"prompt_id": "9", "model": "sft", "against": "base", "label": 0.9, "decided": True})
    assert judge_outcomes(verdicts, ("base", "ppo")) == {"0": "ppo", "1": "base", "2": None}
    answers = {("base", "a"): {"score": 1.0}, ("ppo", "a"): {"score": 2.0}, ("base", "b"): {"score": 1.0},
               ("ppo", "b"): {"score": 1.0}, ("base", "c"): {"score": 1.0}, ("ppo", "c"): {"score": None}}
    assert score_outcomes(answers, ("base", "ppo")) == {"a": "ppo", "b": None}


@pytest.mark.medium
def test_the_report_shows_raters_agreement_and_old_ratings(capsys, run, tmp_path):
    """Ann prefers ppo in 22 of 29 pairs and Bo base in the same pairs; both see a tie in the other 7."""
    sheet = exported(capsys, run, tmp_path / "sheet")
    assert "Human ratings" not in page_of(run).sections
    imported(capsys, run, sheet, filled_page(sheet, choices(sheet), "Ann"))
    shown = page_of(run).text("human-ratings")
    assert "Ann rated 29 pairs of answers of the helpful-only model and the model after RL" in shown
    assert "Ann and the judge 29" in shown and "Ann and the preference model 29" in shown and "All raters" not in shown
    imported(capsys, run, sheet, filled_page(sheet, choices(sheet, "base"), "<b>"), "--rater=Bo")
    shown = page_of(run).text("human-ratings")
    assert "2 people (Ann and Bo) rated 29 pairs" in shown and "50.0% (95% interval 32.9 to 67.1" in shown
    assert "within noise: these ratings do not show which model is better" in shown
    assert "Ann and Bo 29 24.1% (7/29)" in shown and "The majority and the judge" in shown
    write_rows(run / "evaluate" / "rows-00000.jsonl", rows_of("base", 12) + rows_of("ppo", 12))
    shown = page_of(run).sections["human-ratings"]
    assert shown.count("are left out, because stage evaluate has written other answers since") == 2


def test_without_verdicts_of_single_pairs_the_report_says_so(capsys, run, tmp_path):
    (run / "evaluate" / "win_rates.jsonl").unlink()
    sheet = exported(capsys, run, tmp_path / "sheet")
    imported(capsys, run, sheet, filled_page(sheet, choices(sheet), "Ann"))
    assert "the agreement with the judge is unknown" in page_of(run).sections["human-ratings"]
    row = {"prompt_id": "e-1", "model": "ppo", "against": "base", "label": 0.5, "decided": False, "problem": "refused"}
    write_rows(run / "evaluate" / "win_rates.jsonl", [row])
    shown = page_of(run).text("human-ratings")
    assert "The judge has no verdict on the rated pairs of base and ppo." in shown and "Ann and the judge" not in shown


def test_damaged_ratings_are_one_sentence(capsys, run, tmp_path):
    sheet = exported(capsys, run, tmp_path / "sheet")
    imported(capsys, run, sheet, filled_page(sheet, choices(sheet), "Ann"))
    path = next((run / "ratings").iterdir())
    path.write_text(path.read_text().replace('"rating": 0', '"rating": 7'))
    with pytest.raises(Exception, match="has another form than `jaxalign ratings` writes"):
        page_of(run)
    assert read_run(run).planned  # The folder of ratings is no stage.
