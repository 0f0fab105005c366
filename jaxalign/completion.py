"""Completion of the program's commands, flags and config fields in a shell: `jaxalign --completion bash|zsh|fish`.

The script contains all words, so that completing a line starts no Python process. Make it again after an update of jaxalign.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from jaxalign.config import Config, schema
from jaxalign.errors import UserError

SHELLS = ("bash", "zsh", "fish")
_CONFIGURED = ("train", "plan", "preview", "judge-audit")
"""The commands that take --config.FIELD=VALUE."""
_SEVERAL = ("train", "sample", "convert")
"""The commands that run on several hosts."""
_FLAG = re.compile(r"(?:^  |, )(--[\w-]+)(?![\w.-])(=?)", re.MULTILINE)


def script(shell: str, commands: Mapping[str, str]) -> str:
    """The completion script.

    Args:
      shell: one of `SHELLS`.
      commands: the purpose of each command.

    Raises:
      UserError: the shell is not one of them.
    """
    if shell not in SHELLS:
        raise UserError(f"--completion is {shell!r}; it must be one of {', '.join(SHELLS)}")
    flags = {name: flags_of(name) for name in commands}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands, flags)


def flags_of(command: str) -> list[str]:
    """The flags of a command, as in its usage; a flag that takes a value ends with "="."""
    # Read from the source: importing all commands would import JAX, and the commands must not be imported by each other.
    package = Path(__file__).parent
    files = [package / f"{command.replace('-', '_')}.py"]
    if command in _SEVERAL:
        files.append(package / "parallel" / "distributed.py")
    found = []
    for file in files:
        usage = re.search(r'^_?USAGE = f?"""(.*?)"""', file.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        found += [name + value for name, value in _FLAG.findall(usage[1] if usage else "")]
    if command in _CONFIGURED:
        found += [f"--config.{name}=" for name in fields()]
    return list(dict.fromkeys([*found, "--help"]))


def fields() -> list[str]:
    """The names of all fields of the config, such as "ppo.kl_coef"."""
    return list(schema.flatten(Config()))


def _words(flags: Mapping[str, list[str]]) -> str:
    return "".join(f"_jaxalign_{name.replace('-', '_')}='{' '.join(words)}'\n" for name, words in flags.items())


def _bash(commands: Mapping[str, str], flags: Mapping[str, list[str]]) -> str:
    return f"""# bash completion of jaxalign: source this file, or `source <(jaxalign --completion bash)`.
{_words(flags)}
_jaxalign() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    words='{" ".join(commands)} --help --version --completion'
  elif [ "${{COMP_WORDS[1]}}" = --completion ]; then
    words='{" ".join(SHELLS)}'
  elif [[ $current == -* ]]; then
    local name=_jaxalign_${{COMP_WORDS[1]//-/_}}
    words=${{!name}}
  else
    return  # The value of a flag: bash completes files.
  fi
  while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -W "$words" -- "$current")
  if [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}}
complete -o default -F _jaxalign jaxalign
"""


def _zsh(commands: Mapping[str, str], flags: Mapping[str, list[str]]) -> str:
    return f"""#compdef jaxalign
# zsh completion of jaxalign: write this file to a folder of $fpath as _jaxalign, or `source <(jaxalign --completion zsh)`.
{_words(flags)}
_jaxalign() {{
  local name
  if (( CURRENT == 2 )); then
    compadd -- {" ".join(commands)} --help --version --completion
  elif [[ $words[2] == --completion ]]; then
    compadd -- {" ".join(SHELLS)}
  elif [[ $words[CURRENT] == -*=* ]]; then
    compset -P '*='
    _files
  elif [[ $words[CURRENT] == -* ]]; then
    name=_jaxalign_${{words[2]//-/_}}
    compadd -S '' -- ${{=${{(P)name}}}}
  else
    _files
  fi
}}
compdef _jaxalign jaxalign
"""


def _fish(commands: Mapping[str, str], flags: Mapping[str, list[str]]) -> str:
    lines = ["# fish completion of jaxalign: write this file to ~/.config/fish/completions/jaxalign.fish."]
    lines += [f"complete -c jaxalign -n __fish_use_subcommand -f -a {name} -d '{purpose}'"
              for name, purpose in commands.items()]
    lines.append(f"complete -c jaxalign -n __fish_use_subcommand -l completion -x -a '{' '.join(SHELLS)}'")
    for name, words in flags.items():
        for word in words:
            value = " -r" if word.endswith("=") else ""
            lines.append(f"complete -c jaxalign -n '__fish_seen_subcommand_from {name}' -l {word[2:].rstrip('=')}{value}")
    return "\n".join(lines) + "\n"
