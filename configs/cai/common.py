"""The settings that the recipes of this folder share.

The recipes read `cai_config` through `runpy`, because config files are executed as files and are not modules.

Values with a source:

- Constitutional AI (arXiv 2212.08073): four rounds of critique and revision at temperature 1; one epoch on the revisions of all
  rounds at a constant rate; two answers to each prompt of the comparisons.
- RLAIF (arXiv 2309.00267): responses at temperature 0.9 and a KL weight of 0.05.
- The TL;DR reproduction (arXiv 2403.17031): four epochs over the responses, Adam with an epsilon of 1e-5, and a rate of 3e-6
  that falls linearly to 0, for all weights of policy, critic and preference model.
- QLoRA (arXiv 2305.14314): a rate of 2e-4 for adapters in stage sft.

The other rates, the batch sizes, the numbers of prompts and the lengths are choices without a source. None of the recipes has
been run at full size.
"""

from typing import Any, NamedTuple

from jaxalign.config import default_config
from jaxalign.errors import UserError

PROMPT, RESPONSE, REQUEST = 512, 256, 1536  # Tokens of a prompt, of a text that is written, and of a request to a judge.


class Layout(NamedTuple):
    """How a variant is arranged on its devices.

    Attributes:
      data, fsdp, tensor: the sizes of the mesh.
      batch: the responses of an iteration of PPO.
      rows: the rows that other stages sample or judge together.
      micro: the sequences of a micro-batch on each device.
    """

    data: int
    fsdp: int
    tensor: int
    batch: int
    rows: int
    micro: int


def cai_config(variant: str, layouts: dict[str, Layout], judge: str, weights: str) -> Any:
    """The config of Constitutional AI from a chat model to a report.

    Args:
      variant: a key of `layouts`: lora or full, alone or followed by ",judge=larger" or ",judge=endpoint".
      layouts: the variants of the recipe.
      judge: the name of the larger judge's published shape, which --config.judge.path=FOLDER replaces in a run.
      weights: the format of the larger judge's weights.

    Raises:
      UserError: the variant is not one of `layouts`.
    """
    if variant not in layouts:
        raise UserError(f"{variant!r} is not a variant of this recipe; choose one of {'; '.join(layouts)}")
    trained, _, judged_by = variant.partition(",judge=")
    layout, full = layouts[variant], trained == "full"
    config = default_config()
    config.stages = ("revise", "sft", "compare", "preference", "ppo", "evaluate", "report")
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = layout[:3]

    config.model.source = "huggingface"
    config.model.max_length = REQUEST  # The model judges too; a comparison shows the prompt, two answers and a principle.
    config.model.compute_dtype = "bfloat16"
    config.model.remat = True
    if not full:
        config.lora.rank = 16
        config.lora.base = "bfloat16"
    config.data.source = "prompts_jsonl"

    if judged_by == "larger":
        config.feedback.judge = "model"
        config.judge.path = (judge,)
        config.judge.weights = weights
        config.judge.compute_dtype = "bfloat16"
        config.judge.max_length = REQUEST
    elif judged_by == "endpoint":
        config.feedback.judge = "endpoint"
        config.endpoint.url = ("http://localhost:8000/v1",)
        config.endpoint.concurrency = 64
    _set_feedback_stages(config, layout)
    _set_training(config, layout, full)
    return config


def _set_feedback_stages(config: Any, layout: Layout) -> None:
    """Sets the stages that sample or judge and do not train."""
    config.revise.red_team_prompts = 4096
    config.revise.helpful_prompts = 4096
    config.revise.rounds = 4
    config.revise.temperature = 1.0
    config.compare.prompts = 8192
    config.compare.samples = 2
    config.evaluate.prompts = 512
    config.evaluate.win_rate_prompts = 256
    for stage in (config.revise, config.compare, config.evaluate):
        stage.batch = layout.rows
        stage.max_new_tokens = RESPONSE


def _set_training(config: Any, layout: Layout, full: bool) -> None:
    """Sets the stages that train. full: whether all weights are trained."""
    length = PROMPT + RESPONSE
    config.sft.row_length = length
    config.sft.batch_rows = 32
    config.sft.micro_batches = max(1, 32 // (layout.micro * layout.data * layout.fsdp))
    config.sft.optimizer.schedule = "constant"
    config.sft.optimizer.learning_rate = 1e-5 if full else 2e-4

    config.preference.members = 1  # The scorer of each member is in memory during PPO.
    config.preference.epochs = 1
    config.preference.max_length = length
    config.preference.batch = 64
    config.preference.micro_batch_tokens = 2 * layout.micro * length
    config.preference.optimizer.eps = 1e-5
    config.preference.optimizer.learning_rate = 3e-6 if full else 1e-4

    config.ppo.iterations = 200
    config.ppo.prompts = 8192
    config.ppo.batch = layout.batch
    config.ppo.epochs = 4
    config.ppo.micro_batch_tokens = layout.micro * length
    config.ppo.max_new_tokens = RESPONSE
    config.ppo.temperature = 0.9
    config.ppo.kl_coef = 0.05
    config.ppo.optimizer.learning_rate = 3e-6 if full else 3e-5
    config.ppo.critic_optimizer.learning_rate = 3e-6 if full else 1e-4
