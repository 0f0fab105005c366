"""The entry point `python -m jaxalign.sample`: answers one prompt, a file of prompts, or the turns of a dialogue.

Exit codes: 0 done, 2 a mistake that the user can correct (one sentence on stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from jaxalign.commands import explain, parse_flags, run_command
from jaxalign.convert import mesh_sizes
from jaxalign.errors import UserError
from jaxalign.parallel import distributed, hosts

if TYPE_CHECKING:  # At run time these modules import JAX, which a mistyped flag should not wait for.
    from jaxalign.models.language_model import LanguageModel
    from jaxalign.records import Message
    from jaxalign.rollout.sampler import LocalSampler
    from jaxalign.rollout.sampling import Sampling

_STYLES = ("plain", "chat", "hh", "compact")
_MOST_TOKENS = 256
_MOST_ROWS = 16
_USAGE = """usage: python -m jaxalign.sample --model=DIR (--prompt=TEXT | --prompts=FILE | --chat) [options]

  --model=DIR           a Hugging Face folder, an Orbax folder from jaxalign.convert, or the folder of a run's stage, such
                        as runs/quickstart/ppo
  --prompt=TEXT         prints the answer
  --prompts=FILE        answers each prompt of a .txt (one per line), .csv, .json or .jsonl file, optionally .gz, in the formats
                        of training (docs/data_formats.md)
  --chat                holds a dialogue on the terminal or over a pipe; /reset starts over, /quit or end of input ends it
  --json                prints one JSON object per answer, with the other fields of the prompt's row
  --n=COUNT             answers to each prompt; default 1
  --max_new_tokens=N    default 256, or half the model's positions if that is less
  --temperature=T       0 is greedy; default 1
  --top_k=K, --top_p=P  sample from the K most likely tokens, or from the fewest whose total probability reaches P; default all
  --seed=SEED           default 0; equal seeds give equal answers, on any mesh
  --style=STYLE         chat (the model's own template), hh (Human: / Assistant:), compact (this project's markers) or plain
                        (continue the text); default: the run's style, else chat if the model has a template, compact if its
                        tokenizer has the markers, else plain
  --system=TEXT         a system message before every dialogue that has none; needs style chat or hh
  --mesh=D,F,T          sizes of the mesh axes data, fsdp and tensor; default 1,1,1
  --dtype=NAME          dtype of the parameters: float32, bfloat16 or float16; default: that of the files
  --compute_dtype=NAME  dtype of activations: float32, bfloat16 or float16; default: the run's, else float32
""" + distributed.USAGE


def main(argv: Sequence[str] | None = None) -> int:
    """Prints answers and returns the exit code. `argv` includes the program's name; default sys.argv."""
    return run_command(argv, _USAGE, _sample)


def _sample(argv: list[str]) -> None:
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # For input that is not UTF-8, and terminals that cannot show every character.
    group, rest = distributed.take_flags(argv[1:])
    values = _read_arguments([argv[0], *rest])
    with distributed.running(group, explain):
        _run(values)
        sys.stdout.flush()


def _run(values: flags.FlagValues) -> None:
    from jaxalign.config import Mesh  # Imported here so that a mistyped flag is reported without importing JAX.
    from jaxalign.data.sources.asked import Asked, read_asked
    from jaxalign.models.language_model import load_model
    from jaxalign.records import Message

    if values.chat and hosts.count() > 1:
        raise UserError("--chat reads a terminal and needs a single process; give --prompt or --prompts")
    if values.chat:
        asked = []
    elif values.prompts is not None:
        asked = read_asked(values.prompts)
    else:
        asked = [Asked((Message("user", values.prompt),), "--prompt", {}, values.prompt)]
    mesh = Mesh(*mesh_sizes(values.mesh))
    policy = load_model(values.model, mesh, dtype=values.dtype, compute_dtype=values.compute_dtype, style=values.style)
    if values.system and policy.style not in ("chat", "hh"):
        raise UserError(f"--system needs --style=chat or hh; the style is {policy.style}, which has no system messages")
    if values.max_new_tokens is None:
        values.max_new_tokens = min(_MOST_TOKENS, max(1, policy.max_length // 2))
    if values.chat:
        if policy.style == "plain":
            raise UserError("--chat needs a style with turns, and the model's folder has no chat template; give --style=hh, or "
                            "compact for a model trained from scratch here")
        _chat(policy, values)
    else:
        _answer_all(policy, values, asked)


def _sampler(policy: LanguageModel, values: flags.FlagValues, rows: int) -> tuple[LocalSampler, Sampling]:
    """The sampler, for batches of at least `rows` answers, and its settings.

    Raises:
      UserError: a prompt of one token leaves no space for --max_new_tokens.
    """
    from jaxalign.rollout.sampler import Engine, LocalSampler
    from jaxalign.rollout.sampling import section_sampling

    sampling = section_sampling(values, policy.stop_ids)
    if sampling.max_new_tokens >= policy.max_length:
        raise UserError(f"max_new_tokens is {sampling.max_new_tokens}, but the model has only {policy.max_length} positions "
                        "(prompt and answer); lower it")
    parts = policy.model.sharding.generation.batch_size
    return LocalSampler(Engine(policy.model, -(-rows // parts) * parts, policy.max_length), policy.weights), sampling


def _answer_all(policy: LanguageModel, values: flags.FlagValues, asked: list) -> None:
    """Prints the answers to each prompt, four batches at a time.

    A prompt that cannot be answered does not stop the others. With --json its error is printed in place of its answer; the
    first such error is raised at the end.
    """
    import jax

    from jaxalign.rollout.sampler import respond

    sampler, sampling = _sampler(policy, values, min(_MOST_ROWS, len(asked) * values.n))
    prompts, errors = [], {}
    for number, item in enumerate(asked):
        if policy.style == "plain" and len(item.messages) > 1:
            raise UserError(f"{item.place} is a dialogue of {len(item.messages)} messages; --style=plain continues one text")
        ids, error = _encoded(policy, values, item)
        if error is not None:
            errors[number] = f"{item.place} {error}"
        prompts.append(ids)
    key, count = jax.random.key(values.seed), len(prompts) * values.n
    most = 4 * sampler.engine.batch
    for start in range(0, count, most):
        rows = range(start, min(count, start + most))
        responses = respond(sampler, [prompts[row // values.n] for row in rows], key, rows, sampling)
        for row, response in zip(rows, responses, strict=True):
            number, sample = divmod(row, values.n)
            if response.error is not None:
                error = errors.setdefault(number, f"{asked[number].place}: {response.error}")
                if values.json:
                    fields = {"prompt": asked[number].prompt, "sample": sample, "error": error}
                    print(json.dumps(asked[number].columns | fields, ensure_ascii=False), flush=True)
                continue
            text = policy.text(response.ids[:-1] if response.ended else response.ids, prompts[number])
            if values.json:
                item = asked[number]
                fields = {"prompt": item.prompt, "sample": sample, "response": text, "ended": response.ended,
                          "tokens": len(response.ids), "logprob": response.logprob}
                print(json.dumps(item.columns | fields, ensure_ascii=False), flush=True)
            else:
                print(f"--- prompt {number + 1}, answer {sample + 1}\n{text}" if count > 1 else text, flush=True)
    if errors:
        more = f" (and {len(errors) - 1} more of {len(asked)} prompts have no answer)" if len(errors) > 1 else ""
        raise UserError(next(iter(errors.values())) + more)


def _encoded(policy: LanguageModel, values: flags.FlagValues, item) -> tuple[list[int], str | None]:
    """The ids of a prompt, and the reason why it cannot be answered, or None."""
    from jaxalign.data.chat.styles import encode_prompt
    from jaxalign.data.chat.template import DialogueRefused
    from jaxalign.records import Message

    messages = item.messages
    if values.system and messages[0].role != "system":
        messages = [Message("system", values.system), *messages]
    try:
        ids = encode_prompt(policy.tokenizer, messages, policy.style)
    except DialogueRefused as error:
        return [], f"cannot be written in the style {policy.style}: {error}"
    if not ids:
        return ids, "is empty; at least one token is expected"
    longest = policy.max_length - values.max_new_tokens
    if len(ids) > longest:
        return ids, (f"has {len(ids)} tokens; the model's {policy.max_length} positions minus {values.max_new_tokens} "
                     f"new tokens leave {longest} for the prompt: shorten it, or lower --max_new_tokens")
    return ids, None


def _chat(policy: LanguageModel, values: flags.FlagValues) -> None:
    """Reads turns from stdin and streams the answers to stdout, until the input ends."""
    import jax

    from jaxalign.data.chat.styles import encode_prompt
    from jaxalign.records import Message
    from jaxalign.rollout.generation import say

    sampler, sampling = _sampler(policy, values, 1)
    longest = policy.max_length - sampling.max_new_tokens
    asking = "> " if sys.stdin.isatty() else ""
    if asking:
        import readline  # noqa: F401 (gives input() a history)

        print("/reset starts over, /quit ends", file=sys.stderr)
    key, turns, answered = jax.random.key(values.seed), [], 0
    system = [Message("system", values.system)] if values.system else []
    while True:
        try:
            said = input(asking)
        except EOFError:
            return
        if said.strip() == "/quit":
            return
        if said.strip() == "/reset":
            turns = []
        elif said.strip():
            asked = [*system, *turns, Message("user", said)]
            fitting = _fitting(policy, asked, longest)
            if fitting is None:
                print(f"this is too long for an answer to fit: a prompt may have {longest} tokens; shorten "
                      "it, or lower --max_new_tokens", file=sys.stderr, flush=True)
                continue
            if len(fitting) < len(asked):
                print(f"(the oldest {len(asked) - len(fitting)} messages no longer fit and are dropped)", file=sys.stderr)
            prompt = encode_prompt(policy.tokenizer, fitting, policy.style)
            text = say(sampler, policy, prompt, key, answered, sampling, lambda piece: print(piece, end="", flush=True))
            print(flush=True)
            turns = [*(m for m in fitting if m.role != "system"), Message("assistant", text)]
            answered += 1


def _fitting(policy: LanguageModel, messages: Sequence[Message], longest: int) -> tuple[Message, ...] | None:
    """The dialogue without the oldest turns, so that it has at most `longest` tokens; a system message is kept.

    None if the last turn is too long.
    """
    from jaxalign.data.chat.dialogues import cut_front
    from jaxalign.data.chat.styles import encode_prompt

    kept = 1 if messages[0].role == "system" else 0
    system, turns = tuple(messages[:kept]), tuple(messages[kept:])
    fitting = cut_front(turns, lambda part: len(encode_prompt(policy.tokenizer, [*system, *part], policy.style)) <= longest)
    return None if fitting is None else (*system, *fitting)


def _read_arguments(argv: Sequence[str]) -> flags.FlagValues:
    values = flags.FlagValues()
    for name in ("model", "prompt", "prompts"):
        flags.DEFINE_string(name, None, "", flag_values=values)
    for name in ("chat", "json"):
        flags.DEFINE_bool(name, False, "", flag_values=values)
    flags.DEFINE_integer("n", 1, "", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("max_new_tokens", None, "", lower_bound=1, flag_values=values)
    flags.DEFINE_float("temperature", 1.0, "", lower_bound=0.0, flag_values=values)
    flags.DEFINE_integer("top_k", 0, "", lower_bound=0, flag_values=values)
    flags.DEFINE_float("top_p", 1.0, "", lower_bound=1e-9, upper_bound=1.0, flag_values=values)
    flags.DEFINE_integer("seed", 0, "", flag_values=values)
    flags.DEFINE_enum("style", None, _STYLES, "", flag_values=values)
    flags.DEFINE_string("system", "", "", flag_values=values)
    flags.DEFINE_string("mesh", "1,1,1", "", flag_values=values)
    flags.DEFINE_enum("dtype", None, ("float32", "bfloat16", "float16"), "", flag_values=values)
    flags.DEFINE_enum("compute_dtype", None, ("float32", "bfloat16", "float16"), "", flag_values=values)
    parse_flags(values, argv)
    if not values.model:
        raise UserError("--model is not given; it must be a folder")
    if sum((values.prompt is not None, values.prompts is not None, values.chat)) != 1:
        raise UserError("one of --prompt=TEXT, --prompts=FILE and --chat is expected")
    if values.chat and (values.json or values.n > 1):
        raise UserError(f"--{'json' if values.json else 'n'} cannot be used with --chat; give --prompt or --prompts")
    mesh_sizes(values.mesh)
    return values


if __name__ == "__main__":
    sys.exit(main())
