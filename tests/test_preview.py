"""The preview shows and describes the encoding used in training."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxalign import preview
from jaxalign.data.chat import styles
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Message
from jaxalign.tracking.tokens import GIVEN, LEARNT, SCORED, TokenRow, show, visible
from tests import made_tokenizers, table_files

PAIRS = [("Why did it sit?", "It is 4.", "the mat."), ("a", "b <|im_end|> c", "d"), ("Then?", "It barked.\n\nIt slept.", "x")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("preview")
    made_tokenizers.qwen(root / "model")

    def turns(*texts):
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]

    rows = [{"chosen": turns(ask, good), "rejected": turns(ask, bad)} for ask, good, bad in PAIRS]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    system = {"role": "system", "content": "Be kind."}
    (root / "one.json").write_text(json.dumps([system, *turns("Why?", "It is 4.", "b", "c")]))
    (root / "many.jsonl").write_text("".join(json.dumps({"messages": turns("Why?", good)}) + "\n" for _, good, _ in PAIRS))
    (root / "small.py").write_text(f"""
from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("sft", "preference", "dpo", "ppo")
    config.model.source, config.model.path = "huggingface", {str(root / "model")!r}
    config.data.source, config.data.train = "preferences_jsonl", {str(root / "pairs.jsonl")!r}
    config.data.held_out_share = 0.0
    return config
""")
    return root


@pytest.fixture
def run(folder, capsys):
    def call(*arguments):
        code = preview.main(["preview", *arguments])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture
def rows(folder):
    """The rows of a stage before their layout."""

    def call(stage, *arguments):
        own, rest = preview._take_own([f"--config={folder / 'small.py'}", f"--stage={stage}", "--rows=9", *arguments])
        return preview._of_stage(own, ["preview", *rest])[1]

    return call


def ids_of(folder):
    tokenizer, out = load_tokenizer(folder / "model"), []
    for ask, good, bad in PAIRS:
        prompt = styles.encode_prompt(tokenizer, [Message("user", ask)], "chat")
        out.append((prompt, *(styles.encode_answer(tokenizer, text, "chat") for text in (good, bad))))
    return out


def test_rows_of_sft_are_the_good_answers(folder, rows):
    expected = [(prompt + good, GIVEN * len(prompt) + LEARNT * len(good)) for prompt, good, _ in ids_of(folder)]
    assert [(row.ids, row.marks) for row in rows("sft")] == expected


def test_rows_of_dpo_are_both_answers(folder, rows):
    expected = [(prompt + answer, GIVEN * len(prompt) + LEARNT * len(answer))
                for prompt, *answers in ids_of(folder) for answer in answers]
    assert [(row.ids, row.marks) for row in rows("dpo")] == expected


def test_rows_of_the_preference_model_are_scored_at_their_last_token(folder, rows):
    expected = [prompt + answer for prompt, *answers in ids_of(folder) for answer in answers]
    found = rows("preference")
    assert [row.ids for row in found] == expected
    assert {row.marks.strip(GIVEN) for row in found} == {SCORED} and found[0].marks.endswith(SCORED)
    assert found[0].notes == ("better with probability 1",) and found[1].notes == ("better with probability 0",)


def test_rows_of_ppo_are_prompts_and_say_where_sampling_stops(folder, rows):
    found = rows("ppo", "--config.ppo.max_new_tokens=5")
    assert [row.ids for row in found] == [prompt for prompt, *_ in ids_of(folder)]
    assert found[0].notes == ("then up to 5 sampled tokens, which are trained on, up to the first of <|im_end|>",)


def test_rows_of_revise_and_compare_are_the_prompts_of_their_files(folder, rows):
    (folder / "red.txt").write_text("Why?\nWho?\n")
    (folder / "judge.py").write_text("class Judge:\n    critique = revise = compare = lambda self, requests, draw: []\n")
    own = ("--config.data.source=prompts_jsonl", "--config.data.train=", f"--config.data.red_team={folder / 'red.txt'}",
           "--config.stages=('revise', 'compare')", f"--config.feedback.judge={folder / 'judge.py'}:Judge")
    tokenizer = load_tokenizer(folder / "model")
    expected = [styles.encode_prompt(tokenizer, [Message("user", text)], "chat") for text in ("Why?", "Who?")]
    for stage in ("revise", "compare"):
        found = rows(stage, *own, f"--config.{stage}.max_new_tokens=7")
        found = [row for row in found if row.ids]  # The requests to this judge have no tokens.
        assert [row.ids for row in found] == expected and {row.marks.strip(GIVEN) for row in found} == {""}
        assert found[0].notes[0].startswith("then up to 7 sampled tokens, ")


def test_truncation_is_noted(rows):
    cut = [row for row in rows("sft", "--config.sft.row_length=20") if row.notes]
    assert cut and all(len(row.ids) == 20 and row.notes[0].endswith("to 20") for row in cut)


def test_without_colour_trained_tokens_are_underlined(run, folder):
    code, out, _ = run(f"--config={folder / 'small.py'}", "--rows=1")
    assert code == 0 and "\x1b" not in out
    assert "tokenizer: 335 ids, bos none, eos <|im_end|> (332), pad <|endoftext|> (330)" in out
    lines = out.splitlines()
    answer = next(i for i, line in enumerate(lines) if line.startswith("It"))
    assert lines[answer].replace("│", "") == "It·is·4.«<|im_end|>»"
    assert len(lines[answer + 1]) == len(lines[answer]) and set(lines[answer + 1]) == {"^", " "}
    assert lines[3].startswith("sft 1: ") and lines[3].endswith(" trained on")
    assert not any("^" in line for line in lines[4:answer])


def test_colour_is_used_on_request(run, folder):
    _, out, _ = run(f"--config={folder / 'small.py'}", "--rows=1", "--color=always")
    assert "\x1b[32m" in out and "^" not in out


def test_a_dialogue_is_shown_with_its_last_answer_or_with_all(run, folder):
    given = (f"--model={folder / 'model'}", f"--messages={folder / 'one.json'}")
    _, last, _ = run(*given)
    _, every, _ = run(*given, "--answers=all")
    assert "dialogue 1: " in last and " tokens, 2 trained on" in last  # c and the end of the turn
    tokenizer = load_tokenizer(folder / "model")
    assert f" tokens, {4 + len(tokenizer.encode('It is 4.')) - 1} trained on" in every
    _, several, _ = run(f"--model={folder / 'model'}", f"--messages={folder / 'many.jsonl'}", "--rows=2")
    assert "dialogue 2" in several and "dialogue 3" not in several


def test_ids_are_listed_one_per_line(run, folder):
    _, out, _ = run(f"--config={folder / 'small.py'}", "--rows=1", "--ids")
    assert f"{0:6}{331:9}     «<|im_start|>»" in out.splitlines()


def test_a_special_token_typed_as_text_looks_different(run, folder):
    _, out, _ = run(f"--config={folder / 'small.py'}", "--rows=2")
    second = out[out.index("sft 2") :]
    assert second.count("«<|im_end|>»") == 2 and "<│" in second


def test_control_characters_in_a_text_are_escaped():
    class Echo:
        special_ids = frozenset()

        @staticmethod
        def piece(token):
            return "\x1b[2J\u202e\x07"

    assert "\x1b" not in show(TokenRow("x", [1], GIVEN), Echo, False)
    assert visible("a\x1b b\n\u202e") == "a\\x1b·b↵\\u202e"


@pytest.mark.parametrize(("arguments", "message"), [
    (["--stage=sfft"],
     "--stage is 'sfft'; it must be one of revise, sft, compare, preference, dpo, ppo, rate; did you mean sft?"),
    (["--rows=0"], "--rows is '0'; a number of at least 1 is expected"),
    (["--rows="], "--rows has no value"),
    (["--model=x"], "--messages is not given"),
    (["--model=x", "--messages=y", "--overwrite"], "--overwrite cannot be used with --model and --messages"),
    (["--answers=all"], "--answers needs --messages"),
    (["--roows=2"], "--roows is not a flag"),
    (["--config.data.style=chatt"],
     "config.data.style is 'chatt'; it must be one of auto, compact, hh, chat, plain; did you mean chat?"),
    (["--config.data.style=compact"], "config.data.style is 'compact', but the tokenizer of"),
    (["--config.model.source=scratch", "--config.model.path=", "--config.data.style=chat"],
     "config.data.style is 'chat', which is for pretrained models"),
])
def test_mistakes_are_reported_in_one_sentence(run, folder, arguments, message):
    config = [] if arguments[0].startswith("--model") else [f"--config={folder / 'small.py'}"]
    code, out, err = run(*config, *arguments)
    assert (code, out) == (2, "") and err.startswith(message) and err.count("\n") == 1


@pytest.mark.parametrize("text", ["[]", "{}", "3", '[{"role": "user"}]', '[{"role": "user", "content": 3}]', "", "x"])
def test_a_file_without_dialogues_is_reported_in_one_sentence(tmp_path, text):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(UserError, match="contains no dialogues"):
        preview.read_dialogues(tmp_path / "m.json")


def test_data_from_an_earlier_stage_must_exist(run, tmp_path):
    code, _, err = run("--config=configs/quickstart.py", "--stage=sft", f"--workdir={tmp_path}")
    assert code == 2 and err.startswith("the rows of sft come from stage pretrain, which has not been run in")


@pytest.mark.process
def test_it_runs_as_a_command(folder):
    command = [sys.executable, "-m", "jaxalign.preview", f"--model={folder / 'model'}", f"--messages={folder / 'one.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0 and "dialogue 1: " in done.stdout


def test_the_columns_of_the_data_are_shown_with_their_mapping_and_a_row(folder, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    rows = [{"ask": ask, "good": good, "bad": bad} for ask, good, bad in PAIRS]
    table = table_files.write_parquet_folder(tmp_path / "pairs", rows, 2)
    command = ["preview", f"--config={folder / 'small.py'}", "--stage=dpo", "--color=never", f"--config.data.train={table}"]
    assert preview.main([*command, "--config.data.columns=prompt=ask,chosen=good,rejected=bad"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"config.data.train: {table} (3 rows, fields prompt, chosen, rejected)"
    assert lines[1] == "  field prompt is read from column ask"
    assert lines[4] == (f'  {table}/train-00000.parquet row 1: {{"prompt": "Why did it sit?", "chosen": "It is 4.", '
                        '"rejected": "the mat."}')
    assert preview.main([*command, "--config.data.columns=prompt=aks"]) == 2
    assert "has no column 'aks'; its columns are ask, good, bad: did you mean 'ask'?" in capsys.readouterr().err


def test_messages_may_be_a_column_of_a_table(folder, tmp_path):
    pytest.importorskip("pyarrow")
    rows = [json.loads(line) for line in (folder / "many.jsonl").read_text().splitlines()]
    table = table_files.write_parquet_folder(tmp_path / "many", rows, 2)
    assert preview.read_dialogues(table) == preview.read_dialogues(folder / "many.jsonl")


def test_messages_may_be_zipped_and_begin_with_a_byte_order_mark(folder, tmp_path):
    content = b"\xef\xbb\xbf" + (folder / "many.jsonl").read_bytes()
    (tmp_path / "zipped.jsonl.gz").write_bytes(gzip.compress(content))
    assert preview.read_dialogues(tmp_path / "zipped.jsonl.gz") == preview.read_dialogues(folder / "many.jsonl")
