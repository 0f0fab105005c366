"""The speed benchmarks at their smallest: each runs, reports its fields, and compares pairs with a peer."""

from __future__ import annotations

import importlib
import json
import math
import pathlib
import subprocess
import sys

import pytest

from jaxalign.errors import UserError

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))
import common  # noqa: E402
import versus  # noqa: E402

MODEL = ["--layers", "1", "--dim", "8", "--heads", "2", "--ffn", "8", "--vocab", "32", "--json"]
TEXT = ["--batch", "2", "--length", "32", "--documents", "40", "--steps", "2", "--pairs", "2"]
ROLLS = ["--batch", "4", "--prompt", "4", "--new", "4", "--pairs", "2"]
SAME = {"layers": 1, "dim": 8, "heads": 2, "ffn": 8, "vocab": 32, "batch": 3, "prompt": 4, "new": 6, "steps": 1}
"""Flags that describe one workload to every benchmark."""
PEER = """
import json, sys
steps = int(sys.argv[sys.argv.index("--steps") + 1])
print("a line before")
print(json.dumps({"step_s": [100.0] * 2 + [2.0] * (steps - 2), "tokens": [1] * steps, "args": sys.argv[1:]}))
"""


def run(name: str, capsys, *words: str) -> dict:
    assert importlib.import_module(name).main([*MODEL, *words]) == 0
    return json.loads(capsys.readouterr().out)


class Parsed(Exception):
    """Ends a benchmark after its flags are read."""


@pytest.fixture
def parse(monkeypatch):
    """Return a function that parses a benchmark's flags and returns its options, without running it."""
    kept = common.Parser.parse_args

    def stop(parser, argv):
        raise Parsed(kept(parser, argv))

    def parsed(name: str, *words: str) -> dict:
        monkeypatch.setattr(common.Parser, "parse_args", stop)
        with pytest.raises(Parsed) as caught:
            importlib.import_module(name).main(list(words))
        return vars(caught.value.args[0])

    return parsed


@pytest.fixture
def peer(tmp_path):
    """Flags of a peer whose steps take 2 s after two that do not count."""
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    return ["--peer-python", sys.executable, "--peer-script", str(script)]


@pytest.mark.medium
@pytest.mark.variants(1)
@pytest.mark.parametrize(("name", "words"), [("sft", TEXT), ("dpo", TEXT), ("preference", TEXT),
                                             ("rollout", [*ROLLS, "--queue", "6"])])
def test_without_a_peer_every_round_and_the_median_are_reported(name, words, capsys, tmp_path):
    found = run(name, capsys, *words, "--out", str(tmp_path / "found.json"))
    assert json.loads((tmp_path / "found.json").read_text()).keys() == found.keys()
    assert found["benchmark"] == name and found["args"]["layers"] == 1 and found["machine"]["cores"] >= 1
    assert len(found["pairs"]) == 2 and all(pair["ours_s"] > 0 and pair["ours"]["compiled"] == 0 for pair in found["pairs"])
    assert found["ours_s"] == pytest.approx(sum(pair["ours_s"] for pair in found["pairs"]) / 2)
    assert "peer_s" not in found and "ratio" not in found


@pytest.mark.slow
def test_a_ppo_iteration_against_a_peer(peer, capsys):
    found = run("ppo_iteration", capsys, *ROLLS, "--steps", "2", "--vs", "trl", *peer)
    assert found["peer_s"] == 2.0 and len(found["pairs"]) == 2
    for pair in found["pairs"]:
        assert pair["ratio"] == pytest.approx(pair["ours_s"] / 2.0)
        assert all(4 <= tokens <= 16 for tokens in pair["ours"]["new_tokens"])
    arguments = found["pairs"][0]["peer"]["args"]
    assert arguments[arguments.index("--steps") + 1] == "4" and arguments[arguments.index("--vocab") + 1] == "32"
    # By hand: one table of 32 x 8 (tied); a layer's 4 x 8 x 8 + 3 x 8 x 8 and 2 norms; the last norm.
    assert found["parameters"] == 32 * 8 + 7 * 64 + 2 * 8 + 8


@pytest.mark.slow
def test_phases_of_a_ppo_iteration(capsys):
    found = run("ppo_iteration", capsys, *ROLLS, "--steps", "2", "--stop", "none", "--parts")
    assert found["parts_s"].keys() == {"generate", "experience", "update", "rest"}
    assert sum(found["parts_s"].values()) == pytest.approx(sum(found["ours"]["step_s"]) / 2)
    assert found["ours"]["new_tokens"] == [16.0, 16.0]


@pytest.mark.slow
def test_the_update_is_compared_with_products_of_its_shapes(capsys):
    found = run("update_rate", capsys, *ROLLS[:-2], "--steps", "1", "--pairs", "1", "--runs", "1")
    # By hand: 2 models x (4 x 8 x 8 + 3 x 8 x 8) weights and 32 tokens, an LM head of 8 x 32 at 16 tokens, with 6 operations
    # per weight and token; causal attention with 12 operations for each of 36 pairs, 4 rows, 8 dimensions and 2 models.
    assert found["update_flops"] == 6 * (2 * 448 * 32 + 256 * 16) + 12 * 36 * 4 * 8 * 2
    assert found["ratio"] > 0 and len(found["rounds"]) == 1


def test_chunked_logprobs_need_less_memory_than_full_logits(capsys):
    words = ["--vocab", "8192", "--batch", "8", "--length", "1024"]
    found = run("logprob_memory", capsys, *words)["compiled"]
    logits = 4 * 8 * 1024 * 8192
    for what in ("values", "gradients"):
        assert found[what]["chunked"] < logits / 2 < logits <= found[what]["formed"]


def test_gae_is_timed(capsys):
    importlib.import_module("advantages_scan").main(["--batch", "2", "--new", "8", "--rounds", "1", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 1 and rows[0].keys() == {"batch", "new", "scan_ms", "numpy_ms", "eager_ms"}


def test_the_first_step_is_timed_cold_and_warm(capsys, monkeypatch):
    module = importlib.import_module("first_step")
    times = iter((9.0, 3.0))
    monkeypatch.setattr(module, "start", lambda words, cache: next(times))
    found = run("first_step", capsys, *ROLLS[:-2], "--pairs", "1")
    assert (found["cold_s"], found["warm_s"], found["ratio"]) == (9.0, 3.0, pytest.approx(1 / 3))


@pytest.mark.parametrize(("name", "unused", "instead"), [
    ("ppo_iteration", "", {}), ("update_rate", "", {}), ("rollout", "", {}), ("first_step", "steps", {}),
    ("sft", "prompt new", {"length": 10}), ("dpo", "prompt new", {"length": 10}), ("preference", "prompt new", {"length": 10}),
    ("logprob_memory", "layers heads ffn prompt new steps", {"length": 10}),
    ("advantages_scan", "layers dim heads ffn vocab prompt steps", {"batch": [3], "new": [6]}),
])
def test_all_benchmarks_accept_one_set_of_flags_and_drop_the_unused_ones(name, unused, instead, parse):
    options = parse(name, *(word for flag, value in SAME.items() for word in (f"--{flag}", str(value))))
    arguments = {flag: value for flag, value in options.items() if flag in (*SAME, "length")}
    assert arguments == {flag: value for flag, value in SAME.items() if flag not in unused.split()} | instead


def test_the_default_length_is_that_of_prompt_and_new_tokens_if_these_are_given(parse):
    assert parse("sft")["length"] == 512
    assert parse("sft", "--new", "6")["length"] == 32 + 6
    assert parse("sft", "--new", "6", "--length", "7")["length"] == 7


def test_help_marks_unused_flags(capsys):
    with pytest.raises(SystemExit):
        importlib.import_module("first_step").main(["--help"])
    said = capsys.readouterr().out
    assert "--steps STEPS not used here" in " ".join(said.split()) and said.count("not used here") == 1


@pytest.mark.parametrize(("name", "words", "said"), [
    ("rollout", "--queue 0", "argument --queue: 0 is too small; 1 or more is expected"),
    ("sft", "--steps 0", "argument --steps: 0 is too small; 1 or more is expected"),
    ("dpo", "--length 1", "argument --length: 1 is too small; 2 or more is expected"),
    ("preference", "--pairs 0", "argument --pairs: 0 is too small; 1 or more is expected"),
    ("advantages_scan", "--new 8 -1", "argument --new/--length: -1 is too small; 1 or more is expected"),
    ("logprob_memory", "--layers 0", "argument --layers: 0 is too small; 1 or more is expected"),
    ("update_rate", "--vocab 4", "argument --vocab: 4 is too small; 5 or more is expected"),
    ("ppo_iteration", "--dim 16 --heads 3", "argument --heads: 3 does not divide --dim, which is 16"),
])
def test_an_invalid_flag_is_reported_in_one_line(name, words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main(words.split())
    assert ended.value.code == 2 and capsys.readouterr().err.splitlines()[-1].endswith(f"error: {said}")


def test_a_mistake_of_the_user_ends_a_benchmark_with_one_line(capsys):
    def main(argv):
        raise UserError("--data needs --tokenizer")

    with pytest.raises(SystemExit) as ended:
        common.run_main(main)
    assert ended.value.code == 1 and capsys.readouterr().err == "--data needs --tokenizer\n"


def test_trl_sampling_uses_the_peer_of_hugging_face(tmp_path, monkeypatch, capsys):
    (tmp_path / "hf_generate.py").write_text(PEER)
    monkeypatch.setattr(versus, "PEERS", tmp_path)
    words = [*ROLLS[:-2], "--pairs", "1", "--queue", "2", "--vs", "trl", "--peer-python", sys.executable]
    assert run("rollout", capsys, *words)["peer"] == "HF generate, as TRL samples"


def test_changed_result_files_do_not_mark_the_commit_as_changed(tmp_path, monkeypatch):
    folder, results = tmp_path / "benchmarks", tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for file in (folder / "sft.py", results / "sft.json"):
        file.write_text("as committed")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(common, "__file__", str(folder / "common.py"))
    (results / "sft.json").write_text("of another run")
    commit = common._commit()
    assert len(commit) >= 7 and "+" not in commit
    (folder / "sft.py").write_text("changed")
    assert common._commit() == commit + "+"


def test_the_cost_of_a_step():
    seen = {"step_s": [50.0, 1.0, 2.0, 6.0], "tokens": [1, 10, 10, 40]}
    assert versus.cost(seen, "step", 1) == 2.0
    assert versus.cost(seen, "mean", 1) == 3.0
    assert math.isclose(versus.cost(seen, "token", 1), 9 / 60)
    with pytest.raises(UserError, match="--steps"):
        versus.cost(seen, "step", 4)


def test_the_error_of_a_failed_peer_has_the_end_of_its_output(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text("raise SystemExit('no such module: peer')")
    with pytest.raises(UserError, match="no such module: peer"):
        versus.run_peer([sys.executable, str(script)])


def test_all_lists_the_benchmarks_whose_requirements_are_given(capsys):
    everything = importlib.import_module("all")
    assert everything.main(["--list"]) == 0
    alone = capsys.readouterr().out
    assert "update_rate: " in alone and "--vs" not in alone
    given = ["--trl-python", "p", "--tunix-python", "q", "--peers", "r", "--instructions", "s", "--preferences", "t",
             "--tokenizer", "u"]
    everything.main([*given, "--list"])
    listed = capsys.readouterr().out
    assert listed.count("--vs trl") == 5 and listed.count("--vs tunix") == 3 and listed.count("--vs hf") == 1
