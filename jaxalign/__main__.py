"""The program `jaxalign`, also `python -m jaxalign`: runs the entry point of a command, such as `jaxalign train`.

`jaxalign COMMAND ARGUMENTS` does the same as `python -m jaxalign.COMMAND ARGUMENTS`, with the same exit codes. Only the module
of the command is imported.
"""

from __future__ import annotations

import runpy
import sys
from difflib import get_close_matches

from jaxalign import __version__
from jaxalign.errors import UserError, print_error

_COMMANDS = {
    "init": "writes a config, prompts and a constitution for a model of your own, and checks whether the model can judge",
    "train": "runs the stages of a config, or resumes an interrupted run",
    "plan": "estimates the memory, time and cost of a run for devices that need not be attached",
    "preview": "prints the tokens that a model or a judge sees, and which of them the model learns from",
    "sample": "answers a prompt, a file of prompts, or the turns of a dialogue",
    "convert": "converts models between the formats of Hugging Face and Orbax",
    "export": "writes the answers, pairs and labels of a run as data sets for other libraries",
    "watch": "shows runs while they go on: progress, rates, memory, alerts",
    "compare": "writes one HTML page that compares runs: settings, rates, curves, answers",
    "judge-audit": "measures a judge on pairs of answers of which the better one is known",
    "ratings": "writes blind sheets of answers for people to rate, and imports their ratings",
    "track": "sends the metrics of a run to TensorBoard, Weights & Biases, MLflow or trackio",
    "doctor": "examines this machine, and tests jaxalign on its devices",
    "world": "exports the embedded world as a chat model, or scores answers in it",
}


def main() -> int:
    """Runs the command that sys.argv names; its module ends the process.

    Returns:
        The exit code, if no command ran: 0 after --help, --version or --completion, 2 after a mistake in the arguments.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in _COMMANDS:
        del sys.argv[1]
        runpy.run_module(f"jaxalign.{name.replace('-', '_')}", run_name="__main__", alter_sys=True)
    elif name in ("-h", "--help"):
        lines = [f"  {command:<13}{purpose}" for command, purpose in _COMMANDS.items()]
        print("\n".join(["usage: jaxalign COMMAND [ARGUMENTS]", "       jaxalign --version",
                         "       jaxalign --completion bash|zsh|fish", "", *lines, "",
                         "`jaxalign COMMAND --help` describes the arguments of a command."]))
    elif name == "--completion":
        from jaxalign.completion import script  # The words include the config's fields, which no command should wait for.

        try:
            print(script(sys.argv[2] if len(sys.argv) > 2 else "", _COMMANDS), end="")
        except UserError as error:
            return print_error(str(error), 2)
    elif name == "--version":
        print(f"jaxalign {__version__}")
    elif not name:
        return print_error("no command is given; `jaxalign --help` lists the commands", 2)
    else:
        near = get_close_matches(name, _COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(_COMMANDS)} is expected"
        return print_error(f"{name!r} is not a command of jaxalign; {hint}", 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
