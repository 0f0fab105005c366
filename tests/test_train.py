"""The command line: the effect of each argument, and one sentence with exit code 2 for every mistake."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from jaxalign import train
from jaxalign.config import Config
from jaxalign.errors import UserError
from jaxalign.stages.shared.base import Stage

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Writing(Stage):
    name = "pretrain"
    config_fields = ("seed",)

    def inputs(self, config):
        return ()

    def run(self, context):
        (context.directory / "seed").write_text(str(context.config.seed))


@pytest.fixture
def stage(monkeypatch):
    """A fake pretrain stage."""
    made = Writing()
    monkeypatch.setattr("jaxalign.stages.pretrain.PretrainStage", made)
    return made


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    """The current folder, with a config file small.py."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "small.py", """
        config = default_config()
        config.stages = ("pretrain",)
        config.compile_cache = None
        config.seed = 3
        return config
    """)
    return tmp_path


def write(path: pathlib.Path, body: str, arguments: str = "") -> None:
    lines = ["from jaxalign.config import default_config", f"def get_config({arguments}):"]
    path.write_text("\n".join([*lines, *body.strip("\n").split("\n")]).replace("        ", "    ") + "\n")


def read(*arguments: str):
    return train.read_arguments(["train", *arguments])


def config_of(*arguments: str) -> Config:
    return read("--config=small.py", *arguments)[0]


def refusal(capsys, *arguments: str) -> str:
    """Return the error message; check that it is the only output, one line on stderr."""
    assert train.main(["train", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err.strip()


def test_a_mesh_of_too_many_devices_is_refused_before_the_batches_that_it_does_not_divide(capsys):
    assert train.main(["train", "--config.mesh.data=16", "--config.pretrain.batch_rows=8"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "config.mesh asks for data=16 = 16 devices, but 8 are available; data=8 would fit" in lines[0]
    assert "config.pretrain.batch_rows is 8; it must be a multiple of config.mesh.data (16)" in lines[1]
    assert train.main(["train", "--config.mesh.data=8", "--config.pretrain.batch_rows=9"]) == 2
    assert capsys.readouterr().err.startswith("config.pretrain.batch_rows is 9; it must be a multiple of config.mesh.data (8)")


def test_without_arguments_the_quickstart_is_run(folder):
    config, workdir, overwrite = read()
    assert config == Config()
    assert workdir == pathlib.Path("runs/quickstart") and overwrite is False


def test_a_config_in_the_current_folder_takes_precedence_over_the_packages(folder):
    (folder / "configs").mkdir()
    write(folder / "configs/quickstart.py", """
        config = default_config()
        config.seed = 11
        return config
    """)
    assert read()[0].seed == 11


def test_the_work_directory_is_named_after_the_config_file(folder):
    assert read("--config=small.py")[1] == pathlib.Path("runs/small")
    assert read("--config", "small.py", "--workdir", "a/b")[1] == pathlib.Path("a/b")


def test_a_config_file_can_take_an_argument(folder):
    write(folder / "sized.py", """
        config = default_config()
        config.model.layers = int(layers)
        return config
    """, "layers")
    config, workdir, _ = read("--config=sized.py:7")
    assert config.model.layers == 7 and workdir == pathlib.Path("runs/sized-7")


def test_values_of_every_type_from_the_command_line(folder):
    config = config_of(
        "--config.seed=5", "--config.ppo.kl_coef", "0.25", "--config.ppo.clip=1", "--config.feedback.invert",
        "--noconfig.feedback.reasoning", "--config.ppo.whiten_advantages=False", "--config.ppo.value_clip=None",
        "--config.ppo.target_kl=0.5", "--config.feedback.constitution=007", "--config.compile_cache=/a b/c",
        "--config.stages=pretrain, sft", "--config.sft.optimizer.schedule=linear")
    assert (config.seed, config.ppo.kl_coef, config.ppo.clip) == (5, 0.25, 1.0)
    assert (config.feedback.invert, config.feedback.reasoning, config.ppo.whiten_advantages) == (True, False, False)
    assert (config.ppo.value_clip, config.ppo.target_kl) == (None, 0.5)
    assert (config.feedback.constitution, config.compile_cache) == ("007", "/a b/c")
    assert config.stages == ("pretrain", "sft")
    assert config.sft.optimizer.schedule == "linear"


@pytest.mark.parametrize("stages", ["('pretrain', 'sft')", "['pretrain','sft']", "pretrain,sft"])
def test_stages_can_be_written_in_three_ways(folder, stages):
    assert config_of(f"--config.stages={stages}").stages == ("pretrain", "sft")


def test_if_a_field_is_set_twice_the_last_value_counts(folder):
    first = "--config.stages=pretrain,report", "--config.seed=1"
    second = "--config.stages", "pretrain,sft", "--config.seed=2"
    config = config_of(*first, *second)
    assert config.stages == ("pretrain", "sft") and config.seed == 2


def test_a_word_in_a_list_of_numbers_is_named_as_given(folder):
    with pytest.raises(UserError, match=r"config.data.weights\[1\] is 'a' \(str\); a float is expected"):
        config_of("--config.data.weights=1,a")


@pytest.mark.parametrize("weights", ["1,0.5", "(1, 0.5)", "[1,0.5]"])
def test_a_list_of_numbers_can_be_written_in_three_ways(folder, weights):
    config = config_of("--config.data.source=preferences_jsonl", "--config.data.train=a.jsonl",
                       "--config.data.extra_train=b.jsonl", f"--config.data.weights={weights}")
    assert config.data.extra_train == ("b.jsonl",) and config.data.weights == (1.0, 0.5)
    with pytest.raises(UserError, match="config.data.weights"):
        config_of("--config.data.weights=much")


def test_the_command_line_takes_precedence_over_the_file_in_any_order(folder):
    assert config_of().seed == 3
    assert read("--config.seed=4", "--config=small.py")[0].seed == 4
    assert config_of("--config.seed=4", "--config.seed=6").seed == 6


@pytest.mark.parametrize("arguments, sentence", [
    (["--overwite"], "--overwite is not a flag; did you mean --overwrite?"),
    (["--ppo.kl_coef=1"], "--ppo.kl_coef is not a flag; did you mean --config.ppo.kl_coef?"),
    (["--zzz"], "--zzz is not a flag; --help lists the flags"),
    (["more"], "'more' is not expected on the command line; a field is set as --config.FIELD=VALUE"),
    (["--config.ppo.kl_coeff=1"], "config.ppo.kl_coeff is not a field of ppo; did you mean kl_coef?"),
    (["--config.ppo.kl_coeff", "1"], "config.ppo.kl_coeff is not a field of ppo; did you mean kl_coef?"),
    (["--config.pppo.clip=1"], "config.pppo is not a field of config; did you mean ppo?"),
    (["--config.seed.x=1"], "config.seed.x is not a field: config.seed is a value, not a section"),
    (["--config.=1"], None),
    (["--config.ppo={'epochs': 2}"],
     "config.ppo is a section; set its fields individually, such as --config.ppo.iterations=VALUE"),
    (["--config.ppo.epochs=0.5"], "config.ppo.epochs is 0.5 (float); an int is expected"),
    (["--config.ppo.epochs=many"], "config.ppo.epochs is 'many' (str); an int is expected"),
    (["--config.feedback.invert=yes"], "config.feedback.invert is 'yes' (str); a bool is expected"),
    (["--config.ppo.epochs=0"], "config.ppo.epochs is 0; it must be at least 1"),
    (["--config.seed"], "--config.seed has no value; set it with --config.seed=VALUE"),
    (["--noconfig.seed"], "--noconfig.seed is only valid for a bool, but config.seed is int; set it with --config.seed=VALUE"),
    (["--overwrite=maybe"], "flag --overwrite=maybe, on the command line; --help lists the flags"),
    (["--workdir"], None),
    (["--workdir="], "--workdir is empty; set it to a folder, or leave it out for runs/small"),
])
def test_a_mistake_on_the_command_line_is_reported_in_one_sentence(folder, capsys, arguments, sentence):
    said = refusal(capsys, "--config=small.py", *arguments)
    assert said == sentence or sentence is None


@pytest.mark.parametrize("given", ["nothere.py", "", "configs"])
def test_a_missing_config_file_is_named(folder, capsys, given):
    (folder / "configs").mkdir()
    assert f"--config={given}: the file does not exist" in refusal(capsys, f"--config={given}")


@pytest.mark.parametrize("override", [[], ["--config.seed=1"]])
@pytest.mark.parametrize("content, sentence", [
    ("def get_config():\n    return 1 / 0\n", "broken.py, line 2: ZeroDivisionError: division by zero"),
    ("def get_config():\n    return int('x')\n", "broken.py, line 2: ValueError: invalid literal"),
    ("import sys\n\ndef get_config():\n    sys.exit('enough')\n", "broken.py, line 4: SystemExit: enough"),
    ("exit()\n", "broken.py, line 1: SystemExit: None"),
    ("def get_config():\n    return open('gone')\n", "broken.py, line 2: FileNotFoundError: "),
    ("\nimport nowhere_to_be_found\n", "broken.py, line 2: ModuleNotFoundError: No module named"),
    ("def get_config(:\n", "broken.py, line 1: "),
    ("x = 1\n", "broken.py has no function get_config()"),
    ("def get_config():\n    pass\n", "get_config() returned an object of type NoneType"),
    ("def get_config():\n    return {'seed': 1}\n", "get_config() returned an object of type dict"),
    ("from jaxalign.config import default_config\n\ndef get_config():\n    c = default_config()\n    c.ppo.clip = 'x'\n"
     "    return c\n", "config.ppo.clip is 'x' (str); a float or None is expected"),
    ("from jaxalign.config import default_config\n\ndef get_config():\n    c = default_config()\n    c.pppo.clip = 1\n"
     "    return c\n", "broken.py, line 5: AttributeError: "),
    ("from jaxalign.errors import UserError\n\ndef get_config():\n    raise UserError('give data')\n", "give data"),
])
def test_the_error_of_a_config_file_has_its_line(folder, capsys, content, sentence, override):
    (folder / "broken.py").write_text(content)
    assert sentence in refusal(capsys, "--config=broken.py", *override)


def test_a_second_run_has_nothing_to_compute(folder, stage, capsys):
    assert train.main(["train", "--config=small.py"]) == 0
    assert (folder / "runs/small/pretrain/seed").read_text() == "3"
    assert train.main(["train", "--config=small.py"]) == 0
    assert "[pretrain] done, nothing to compute" in capsys.readouterr().out


def test_another_config_needs_overwrite(folder, stage, capsys):
    assert train.main(["train", "--config=small.py"]) == 0
    assert train.main(["train", "--config=small.py", "--config.seed=4"]) == 2
    assert "config.seed was 3 and is 4" in capsys.readouterr().err
    assert (folder / "runs/small/pretrain/seed").read_text() == "3"
    assert train.main(["train", "--config=small.py", "--config.seed=4", "--overwrite"]) == 0
    assert (folder / "runs/small/pretrain/seed").read_text() == "4"
    assert (folder / "runs/small/pretrain.old-1/seed").read_text() == "3"


def test_exceptions_of_a_stage_become_sentences_and_exit_codes(folder, stage, capsys):
    def raising(error):
        def run(context):
            raise error
        return run

    stage.run = raising(UserError("mend this"))
    assert train.main(["train", "--config=small.py"]) == 2
    assert capsys.readouterr().err == "mend this\n"
    stage.run = raising(KeyboardInterrupt())
    assert train.main(["train", "--config=small.py"]) == 130
    assert capsys.readouterr().err == "interrupted; run the same command again to resume\n"
    stage.run = raising(OSError(errno.ENOSPC, "No space left on device"))
    assert train.main(["train", "--config=small.py"]) == 2
    assert "the disk is full" in capsys.readouterr().err
    stage.run = raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):  # A bug keeps its traceback.
        train.main(["train", "--config=small.py"])


def test_help_is_printed_without_running(folder, stage, capsys):
    assert train.main(["train", "--help"]) == 0
    assert "--workdir=DIR" in capsys.readouterr().out
    assert not (folder / "runs").exists()


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_process_says_how_to_resume(folder, number, code):
    program = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # Background processes ignore SIGINT by default.
from jaxalign import interrupts, train
from jaxalign.stages import pretrain
from jaxalign.stages.shared.base import Stage

interrupts.install()

class Waiting(Stage):
    name, config_fields = "pretrain", ()
    def inputs(self, config):
        return ()
    def run(self, context):
        print("waiting", flush=True)
        time.sleep(240)

pretrain.PretrainStage = Waiting
sys.exit(train.main(["train", "--config=small.py"]))
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=folder, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    while process.stdout.readline() not in ("waiting\n", ""):
        pass
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == code
    assert said == "interrupted; run the same command again to resume\n"


@pytest.mark.process
def test_the_module_runs_as_a_command(folder):
    command = [sys.executable, "-m", "jaxalign.train", "--config.ppo.kl_coeff=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "config.ppo.kl_coeff is not a field of ppo; did you mean kl_coef?\n"


@pytest.mark.slow
def test_an_option_that_this_machine_cannot_run_leaves_no_stage_folder(folder, capsys):
    """Fused attention needs a GPU or a TPU, which is checked only after the stage has started."""
    tiny = ["--config.model.layers=1", "--config.model.embed=32", "--config.world.tokens=20000",
            "--config.world.vocab_size=400", "--config.pretrain.steps=1", "--config=small.py"]
    assert train.main(["train", *tiny, "--config.model.attention=fused"]) == 2
    assert "fused" in capsys.readouterr().err
    assert not (folder / "runs/small/pretrain").exists()
    assert train.main(["train", *tiny]) == 0
    assert (folder / "runs/small/pretrain/manifest.json").exists()
