"""Tasks of lm-evaluation-harness in stage evaluate: `config.evaluate.lm_eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxalign.config import Config
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import trained
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Model
from jaxalign.parallel import hosts
from jaxalign.stages.shared import engines, run_models
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.tracking.workdir import read_object
from jaxalign.trainers import harness

FIELD = "config.evaluate.lm_eval"
SUFFIXES = (".json", ".jsonl", ".py", ".yaml")
_FOLDER = "lm_eval"


def check_harness(config: Config) -> None:
    """Checks the tasks of `config.evaluate.lm_eval` before a run starts; their data is read only by the stage.

    Raises:
      UserError: lm-eval is not installed, a task is unknown, or the dialogues have no chat template.
    """
    section = config.evaluate
    if section.lm_eval_chat and config.data.style != "chat":
        raise UserError(f"{FIELD}_chat needs the chat template of the model, but config.data.style is {config.data.style!r}; "
                        f"set {FIELD}_chat to False")
    harness.check_tasks(section.lm_eval, _include(config), FIELD)


def _include(config: Config) -> str:
    folder = config.evaluate.lm_eval_include
    return str(Path(folder).expanduser()) if folder else ""


def task_files(config: Config) -> dict[Path, str]:
    """The files of `config.evaluate.lm_eval_include` with the suffixes `SUFFIXES`, and the field that names them."""
    folder = _include(config)
    files = sorted(Path(folder).rglob("*")) if folder else []
    return {path: "evaluate.lm_eval_include" for path in files if path.suffix in SUFFIXES and path.is_file()}


def run_harness(context: StageContext, model: Model, tokenizer: Tokenizer, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Runs the tasks on each model.

    The results of a model are written to "lm_eval/NAME.json" when its tasks are done. A resumed stage reads them from there.

    Args:
      context: the stage.
      model: the architecture of the run's models.
      tokenizer: its tokenizer.
      names: the models, as in `run_models.stage_params`.

    Returns:
      {model: {task: result}}, as from `trainers.harness.run_tasks`; {} without tasks.
    """
    section, results = context.config.evaluate, {}
    if not section.lm_eval:
        return {}
    timing = engines.timing(context, model)
    for name in names:
        path = context.directory / _FOLDER / f"{name.replace('/', '-')}.json"
        found = hosts.once(lambda path=path: read_object(path))
        if not found:
            policy = language_model(context, model, tokenizer, name)
            lm = harness.lm_eval_model(policy, batch=section.batch, seed=context.config.seed)
            with timing.phase("lm_eval"):
                found = harness.run_tasks(lm, section.lm_eval, _include(context.config), section.lm_eval_limit,
                                          section.lm_eval_chat, FIELD)
            del lm, policy  # Free the weights before those of the next model are read.
            write_json(path, found)
        results[name] = found
    return results


def language_model(context: StageContext, model: Model, tokenizer: Tokenizer, name: str) -> LanguageModel:
    """A model of the run, with its adapters over their base. The arguments are those of `run_harness`."""
    config, params = context.config, run_models.stage_params(context, name, model)
    own = None if model.lora is None else trained(params)
    rest = tokenizer, config.data.style, config.model.max_length
    if model.lora is None or not own:  # The base has no adapters yet.
        return LanguageModel(model.base, params, *rest)
    return LanguageModel(model, own, *rest, frozen=run_models.base_params(context, model))
