"""The one config schema: every field with its type, default, documentation and check.

A config file starts from the defaults and changes what it must:

    from jaxalign.config import default_config

    def get_config():
        config = default_config()
        config.ppo.kl_coef = 0.1
        return config

`python -m jaxalign.config` prints the reference page, docs/config.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ml_collections import config_dict

from jaxalign import config_checks, config_schema
from jaxalign.config_schema import above, at_least, between, field, none_or_some_of, one_of, section, some_of, sum_of

STAGES = ("pretrain", "revise", "sft", "compare", "preference", "reward_distill", "best_of_n", "dpo", "online_dpo", "ppo",
          "evaluate", "report")
"""Every stage, in the order of the graph."""
DEFAULT_STAGES = ("pretrain", "revise", "sft", "compare", "preference", "ppo", "evaluate", "report")
POLICY_STAGES = ("sft", "best_of_n", "dpo", "online_dpo", "ppo")
"""The stages that make a policy: each starts from the last one before it that is run."""
PAIRWISE_OBJECTIVES = (
    "sigmoid", "conservative", "robust", "hinge", "ipo", "ipo_mean", "exo_pair", "nca_pair", "bco_pair", "apo_zero",
    "apo_down", "sppo_hard", "aot", "aot_unpaired", "discopop",
)
"""DPO and its relatives: the names of `jaxalign.algorithms.direct_preference.DPO_KINDS`."""
ADVANTAGES_WITH_CRITIC = ("gae", "reinforce", "vtrace")
REWARD_SOURCES = ("preference", "distilled", "model", "callable", "verifier", "ai_feedback")
DIRECT_OBJECTIVES = (*PAIRWISE_OBJECTIVES, "kto", "orpo", "cpo", "simpo")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """How many devices, and what they share. Fewer than the machine has is fine; results do not depend on it."""

    data: int = field(1, "Ways the batch is split, each with a whole copy of the parameters.", at_least(1))
    fsdp: int = field(1, "Ways the batch and also parameters and optimizer state are split.", at_least(1))
    tensor: int = field(1, "Ways heads, MLP and vocabulary are split.", at_least(1))
    context: int = field(1, "Ways the tokens of each row are split, for long sequences.", at_least(1))
    pipeline: int = field(1, "Ways the layers are split.", at_least(1))
    pipeline_micro_batches: int = field(0, "Parts of a batch that pass through the pipeline one after another; 0 is as many as "
                                        "stages. More leave less of it idle.", at_least(0))
    pipeline_repeats: int = field(1, "Blocks of layers a stage holds: above 1 the schedule is interleaved.", at_least(1))
    slices: int = field(1, "Groups of devices joined by a slower network; data is split over them.", at_least(1))
    zero: int = field(3, "What fsdp splits beside the batch: 1 the optimizer state, 2 gradients too, 3 parameters too.",
                      one_of(1, 2, 3))
    sequence_parallel: bool = field(False, "Split what passes between layers over tensor, along its length.")
    generation: str = field("tensor", "Weights while tokens are sampled: gathered over all axes but tensor (tensor), as they "
                            "lie in training (training), or whole on each device (whole).",
                            one_of("tensor", "training", "whole"))
    offload: tuple[str, ...] = field((), "In ppo and online_dpo, what lies in host memory in the phases that do not need it: "
                                     "optimizer state, and frozen roles (reference, reward models). docs/memory.md.",
                                     none_or_some_of("optimizer", "frozen"))


@dataclasses.dataclass(frozen=True)
class Model:
    """The decoder. With source=huggingface its sizes are read from the checkpoint, and those here are not used."""

    source: str = field("scratch", "Where the weights come from.", one_of("scratch", "huggingface"))
    path: str = field("", "Folder of a Hugging Face checkpoint with its tokenizer, for source=huggingface.")
    layers: int = field(4, "Decoder layers.", at_least(1))
    embed: int = field(128, "Width of the residual stream.", at_least(1))
    heads: int = field(4, "Query heads.", at_least(1))
    kv_heads: int = field(2, "Key/value heads; they must divide the query heads.", at_least(1))
    head_dim: int = field(32, "Width of a head; even, for the rotary positions.", at_least(2))
    mlp: int = field(352, "Width of the gated MLP.", at_least(1))
    rope_base: float = field(10000.0, "Base of the rotary frequencies.", above(1))
    norm_eps: float = field(1e-5, "Epsilon of RMSNorm.", above(0))
    tie_embeddings: bool = field(True, "Use the input embedding as the output projection too.")
    vocab_multiple: int = field(1, "The tables' rows are padded to a multiple of this, so that mesh.tensor can divide them.",
                                at_least(1))
    max_length: int = field(320, "Longest prompt and response together, in tokens; longer dialogues are cut at a turn.",
                            at_least(8))
    remat: bool = field(False, "Compute each layer again in the backward pass, keeping only what goes into it: less memory for "
                        "about a third more work.")
    remat_saves: str = field("nothing", "With remat: keep nothing else of a layer, or the results of its products with weights "
                             "too (products): more memory, less computed twice.", one_of("nothing", "products"))
    attention: str = field("auto", "auto: a fused kernel where the platform has one, ring attention where mesh.context splits "
                           "rows; plain: the formula; fused: refused where there is no kernel.",
                           one_of("auto", "plain", "fused"))
    cache_dtype: str = field("compute", "Type of the keys and values that sampling keeps: that of activations (compute), or "
                             "another; int8 has a scale for each token and head, and changes what is sampled a little.",
                             one_of("compute", "float32", "bfloat16", "int8"))
    load_balance_coef: float = field(0.0, "Weight of the load-balancing loss of a model with experts, in supervised training.",
                                     at_least(0))
    compute_dtype: str = field("float32", "Type of activations and matrix products; parameters stay float32. float16 is for "
                               "GPUs without bfloat16, and scales the loss: docs/memory.md.",
                               one_of("float32", "bfloat16", "float16"))


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters on the frozen base, in every stage that trains a policy, a critic or a preference model."""

    rank: int = field(0, "Rank of each adapter; 0 trains all weights.", at_least(0))
    alpha: float = field(32.0, "What an adapter adds is multiplied by alpha / rank.", above(0))
    targets: tuple[str, ...] = field(("*",), 'Linear layers that get one: patterns over "attention.query" ... "mlp.down", or '
                                     '"q_proj" ... "down_proj".')
    rank_stabilised: bool = field(False, "rsLoRA: alpha / sqrt(rank) in place of alpha / rank.")
    dora: bool = field(False, "DoRA: the length of each weight vector is trained apart.")
    base: str = field("float32", "How the frozen base is stored: int8 with a scale for each output, nf4 in 4 bits with "
                      "one for each 64 numbers of its input.", one_of("float32", "bfloat16", "int8", "nf4"))
    path: str = field("", "PEFT folder (adapter_config.json, adapter_model.safetensors) that policy and reference start from, "
                      "for model.source=huggingface. It says rank, alpha, targets and kind; those here stay as they are.")


@dataclasses.dataclass(frozen=True)
class Data:
    """Where prompts and comparisons come from."""

    source: str = field("world", "The embedded world; human preferences in JSONL; single judged answers in JSONL, for "
                        "dpo.objective=kto; prompts in JSONL, with the columns that a reward reads; or arithmetic.",
                        one_of("world", "preferences_jsonl", "judgements_jsonl", "prompts_jsonl", "arithmetic"))
    train: str = field("", "JSONL file (.gz too), for preferences_jsonl (chosen/rejected), judgements_jsonl "
                       "(prompt/completion/label) and prompts_jsonl.")
    prompt_field: str = field("prompt", "The field of a row that is the prompt, for prompts_jsonl; the others are its columns.")
    extra_train: tuple[str, ...] = field((), "Further such files, mixed with train.")
    weights: tuple[float, ...] = field((), "Shares of an epoch's pairs that come from train and from each of extra_train, in "
                                       "any unit; empty: as many as each file has.")
    held_out_share: float = field(0.05, "Share of the rows kept for evaluation.", between(0.0, 0.9))
    max_bad_share: float = field(0.01, "Share of broken lines over which reading stops.", between(0.0, 1.0))
    empty_answers: str = field("drop", "What becomes of a row one of whose answers is empty.", one_of("drop", "keep"))
    differing_contexts: str = field(
        "drop", "A row whose dialogues differ before the last turn: dropped, or the turns they share are the prompt.",
        one_of("drop", "keep"))
    limit: int = field(0, "Rows of a file used at most; 0 means all.", at_least(0))
    style: str = field("compact", "How dialogues become text: the world's compact markers, the transcripts of HH, or the "
                       "model's own chat template.", one_of("compact", "hh", "chat"))


@dataclasses.dataclass(frozen=True)
class World:
    """The embedded world: short dialogues about made-up topics, with known truth."""

    topics: int = field(60, "Topics in all.", at_least(4))
    held_out_topics: int = field(20, "Topics never demonstrated in pretraining; evaluation is on them.", at_least(1))
    vocab_size: int = field(768, "Pieces of the SentencePiece tokenizer trained on the world's text.", at_least(300))
    tokens: int = field(1_300_000, "Size of the pretraining text in tokens, about.", at_least(10_000))
    ratings: float = field(0.0, "Share of the text that shows how to rate an answer from 1 to 10; reward.source=ai_feedback "
                           "needs it.", between(0.0, 0.5))


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Sums and the like with answers that can be verified, for data.source=arithmetic."""

    operations: tuple[str, ...] = field(("+",), "What is done with the two numbers.", some_of("+", "-", "*"))
    largest: int = field(9, "Both numbers are from 0 to this.", at_least(1))
    modulus: int = field(0, "Answers are the remainder by this, 0 to modulus - 1; 0: the plain result.", at_least(0))
    held_out_share: float = field(0.1, "Share of the problems kept for evaluation.", between(0.0, 0.9))
    examples: int = field(10_000, "Worked problems in the pretraining text.", at_least(100))


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer with gradient clipping and a learning-rate schedule over the stage's steps (docs/memory.md)."""

    kind: str = field("adamw", "The optimizer; adafactor's rate is relative to a weight's size.",
                      one_of("adamw", "lion", "adafactor", "muon", "sophia"))
    learning_rate: float = field(1e-3, "Peak learning rate; 0 keeps the weights.", at_least(0))
    schedule: str = field("cosine", "After the warm-up: constant, or down to 0 on a line or a half cosine.",
                          one_of("constant", "linear", "cosine"))
    warmup_steps: int = field(0, "Steps of linear warm-up from 0.", at_least(0))
    b1: float = field(0.9, "Decay of the first moment (Muon: of the momentum).", between(0.0, 0.9999999))
    b2: float = field(0.95, "Decay of the second moment.", between(0.0, 0.9999999))
    eps: float = field(1e-8, "Adam's epsilon.", above(0))
    eps_inside: bool = field(False, "TensorFlow's form of Adam: epsilon joins before the bias correction.")
    weight_decay: float = field(0.0, "Decoupled weight decay, on matrices only.", at_least(0))
    clip_norm: float | None = field(1.0, "Global gradient norm clipped to; None: no clipping.", above(0))


@dataclasses.dataclass(frozen=True)
class Pretrain:
    """The helpful-only base, trained on the world's text."""

    row_length: int = field(256, "Tokens of a packed row.", at_least(8))
    batch_rows: int = field(4, "Rows of a step.", at_least(1))
    steps: int = field(1300, "Optimizer steps; 0 leaves the random weights.", at_least(0))
    optimizer: Optimizer = section(
        Optimizer(learning_rate=2.5e-3, schedule="linear", warmup_steps=30, weight_decay=0.01), "Its optimizer."
    )
    context_weight: float = field(
        0.1, "Weight in the loss of what a model is given (requests, principles); what it writes weighs 1.", between(0.0, 1.0)
    )
    checkpoint_every: int = field(150, "Steps between checkpoints.", at_least(1))
    micro_batches: int = field(
        0, "Parts a step is computed in, to save memory; results are the same. 0: one; on a CPU, parts of 1,024 tokens or so.",
        at_least(0),
    )


@dataclasses.dataclass(frozen=True)
class Revise:
    """Critique and revision of the base's answers (Bai et al. 2022, supervised phase)."""

    red_team_prompts: int = field(768, "Prompts whose answers are critiqued and revised.", at_least(1))
    helpful_prompts: int = field(512, "Prompts answered plainly, to keep the model helpful.", at_least(0))
    rounds: int = field(4, "Rounds of critique and revision, a fresh principle each.", at_least(1))
    batch: int = field(128, "Prompts of a chunk; as many rows decode together. Up to 4 chunks are one queue.", at_least(1))
    temperature: float = field(0.7, "Sampling temperature; 0 is greedy.", at_least(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    max_new_tokens: int = field(60, "Longest answer, critique or revision.", at_least(1))


@dataclasses.dataclass(frozen=True)
class Feedback:
    """The feedback model: which principles it holds to, and how its labels are made."""

    constitution: str = field("default", "Name of one that comes with the package, or a JSON file.")
    invert: bool = field(False, "Turn every label round: a control, which should make things worse.")
    reasoning: bool = field(True, "Let the feedback model think before it answers (chain of thought).")
    clamp_low: float = field(0.1, "Labels made with reasoning are not below this.", between(0.0, 0.5))
    clamp_high: float = field(0.9, "Labels made with reasoning are not above this.", between(0.5, 1.0))
    principles_per_comparison: int = field(1, "Principles drawn a comparison; their labels are averaged.", at_least(1))
    undecided_margin: float = field(0.02, "A label closer to 0.5 than this is undecided.", between(0.0, 0.5))
    undecided: str = field("drop", "An undecided comparison is kept with the label 0.5, or dropped.",
                           one_of("half", "drop"))
    reasoning_temperature: float = field(0.0, "Sampling temperature of the reasoning; 0 is greedy.", at_least(0))
    max_reasoning_tokens: int = field(160, "Longest reasoning.", at_least(1))


@dataclasses.dataclass(frozen=True)
class Compare:
    """Two answers a prompt, labelled by the feedback model."""

    prompts: int = field(2048, "Prompts answered twice.", at_least(1))
    batch: int = field(128, "Prompts of a chunk; as many rows decode together. Up to 4 chunks are one queue.", at_least(1))
    temperature: float = field(1.0, "Sampling temperature; two greedy answers would be equal.", above(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    max_new_tokens: int = field(60, "Longest answer.", at_least(1))


@dataclasses.dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning on revisions and helpful samples."""

    epochs: int = field(1, "Passes over the data.", at_least(1))
    row_length: int = field(256, "Tokens of a packed row.", at_least(8))
    batch_rows: int = field(4, "Rows of a step.", at_least(1))
    optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear"), "Its optimizer.")
    checkpoint_every: int = field(50, "Steps between checkpoints.", at_least(1))
    micro_batches: int = field(
        0, "Parts a step is computed in, to save memory; results are the same. 0: one; on a CPU, parts of 1,024 tokens or so.",
        at_least(0),
    )
    rounds_used: str = field("all", "Learn from the revisions of all rounds, or of the last.", one_of("all", "last"))


@dataclasses.dataclass(frozen=True)
class Preference:
    """The preference model, trained on soft labels."""

    epochs: int = field(6, "Passes over the comparisons.", at_least(1))
    batch: int = field(32, "Pairs of a step.", at_least(1))
    max_length: int = field(256, "Longest dialogue with its answer; longer ones are cut at a turn.", at_least(8))
    held_out_share: float = field(0.15, "Share of the comparisons kept for accuracy and calibration.", between(0.0, 0.9))
    centering_coef: float = field(0.01, "Weight of the squared sum of a pair's scores, to centre them.", at_least(0))
    normalise: bool = field(True, "Shift and scale scores to mean 0 and deviation 1 on the policy's samples.")
    members: int = field(1, "Models trained apart, each with its own head and order of the pairs; together they score.",
                         between(1, 64))
    combine: str = field("mean", "One score from those of the members: their mean, their least, or their mean less "
                         "std_weight deviations.", one_of("mean", "min", "mean_minus_std"))
    std_weight: float = field(1.0, "Deviations taken off the mean (combine=mean_minus_std).", at_least(0))
    margin_weight: float = field(0.0, "The better answer is to be ahead by so many times its row's \"margin\" (preference "
                                 "files); 0: margins are not read.", at_least(0))
    temperature_fit: bool = field(False, "Fit a temperature on held-out pairs and show the calibration under it; scores stay "
                                  "as they are.")
    optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear", warmup_steps=10), "Its optimizer.")
    checkpoint_every: int = field(50, "Steps between checkpoints.", at_least(1))
    micro_batch_tokens: int = field(0, "Most tokens of packed pairs that a device computes at once; results are the same. 0: "
                                    "a sixteenth of what a batch could need, at least 768.", at_least(0))


@dataclasses.dataclass(frozen=True)
class RewardDistill:
    """A smaller reward model, the student, that learns the scores of the preference model, its teacher."""

    layers: int = field(2, "Decoder layers.", at_least(1))
    embed: int = field(64, "Width of the residual stream.", at_least(1))
    heads: int = field(2, "Query heads.", at_least(1))
    kv_heads: int = field(1, "Key/value heads; they must divide the query heads.", at_least(1))
    head_dim: int = field(32, "Width of a head; even, for the rotary positions.", at_least(2))
    mlp: int = field(176, "Width of the gated MLP.", at_least(1))
    start: str = field("random", "Random weights, or the teacher's embedding, first layers and head (all sizes but layers "
                       "must then be the model's).", one_of("random", "teacher"))
    objective: str = field("regression", "Meet the teacher's scores, or its probability for each pair, or both.",
                           one_of("regression", "pairs", "both"))
    prompts: int = field(1024, "Prompts answered afresh, to be scored.", at_least(1))
    samples: int = field(4, "Answers to each prompt; even, they make pairs.", at_least(2))
    batch: int = field(128, "Answers of a chunk, a multiple of samples; as many rows decode together. Up to 4 "
                            "chunks are one queue. Speed is measured on as many.", at_least(1))
    temperature: float = field(1.0, "Sampling temperature.", above(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    max_new_tokens: int = field(60, "Longest answer.", at_least(1))
    held_out_share: float = field(0.15, "Share of the prompts kept for the agreement with the teacher.",
                                  between(0.001, 0.9))
    epochs: int = field(4, "Passes over the pairs.", at_least(1))
    batch_pairs: int = field(32, "Pairs of a step.", at_least(1))
    optimizer: Optimizer = section(Optimizer(learning_rate=2e-3, schedule="linear", warmup_steps=10), "Its optimizer.")
    checkpoint_every: int = field(100, "Steps between checkpoints.", at_least(1))
    micro_batches: int = field(1, "Parts a step is computed in, to save memory; results are the same.", at_least(1))


@dataclasses.dataclass(frozen=True)
class BestOfN:
    """The best of several answers by the preference model, and fine-tuning on it."""

    prompts: int = field(1024, "Prompts answered.", at_least(1))
    n: int = field(8, "Answers to each prompt.", at_least(1))
    batch: int = field(128, "Answers of a chunk, a multiple of n; as many rows decode together. Up to 4 chunks are one "
                            "queue.", at_least(1))
    threshold: float | None = field(None, "A best answer whose raw score is lower is not learnt from; None: all are.")
    temperature: float = field(1.0, "Sampling temperature.", above(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    max_new_tokens: int = field(60, "Longest answer.", at_least(1))
    epochs: int = field(2, "Passes over what was chosen.", at_least(1))
    row_length: int = field(256, "Tokens of a packed row.", at_least(8))
    batch_rows: int = field(4, "Rows of a step.", at_least(1))
    optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear"), "Its optimizer.")
    checkpoint_every: int = field(50, "Steps between checkpoints.", at_least(1))
    micro_batches: int = field(
        0, "Parts a step is computed in, to save memory; results are the same. 0: one; on a CPU, parts of 1,024 tokens or so.",
        at_least(0),
    )


@dataclasses.dataclass(frozen=True)
class Dpo:
    """Direct preference optimisation: the policy learns from labelled pairs, without a preference model."""

    objective: str = field("sigmoid", "The loss, or a sum of pairwise ones, as in sigmoid+bco_pair; docs/algorithms has each "
                           "one's formula and source.", sum_of(*DIRECT_OBJECTIVES))
    weights: tuple[float, ...] = field((), "Weight of each objective of a sum, in its order; empty: 1 each.")
    beta: float = field(0.1, "Weight of the implicit KL; the temperature of the implicit reward.", above(0))
    label_smoothing: float = field(0.0, "Share of labels taken to be wrong; conservative, robust and exo_pair need "
                                   "it above 0.", between(0.0, 0.499))
    margin: float = field(0.5, "Target margin (simpo: gamma).", at_least(0))
    desirable_weight: float = field(1.0, "Weight of good answers (kto).", at_least(0))
    undesirable_weight: float = field(1.0, "Weight of bad answers (kto).", at_least(0))
    sft_weight: float | None = field(None, "Weight of the better answer's negative log-likelihood a token, beside the "
                                     "objective; None: 1 for orpo and cpo, else 0.", at_least(0))
    reference: str = field("start", "The reference: the weights this stage starts from, or none (its log-probs are 0).",
                           one_of("start", "none"))
    epochs: int = field(4, "Passes over the pairs.", at_least(1))
    batch: int = field(32, "Pairs of a step; for kto, answers.", at_least(1))
    max_length: int = field(256, "Longest dialogue with its answer; longer ones lose their oldest tokens.", at_least(8))
    held_out_share: float = field(0.15, "Share of the world's pairs kept for accuracy; a file has data.held_out_share.",
                                   between(0.0, 0.9))
    optimizer: Optimizer = section(Optimizer(learning_rate=2e-4, schedule="linear", warmup_steps=10), "Its optimizer.")
    checkpoint_every: int = field(50, "Steps between checkpoints.", at_least(1))
    micro_batch_tokens: int = field(0, "Most tokens of packed pairs that a device computes at once; results are the same. 0: "
                                    "a sixteenth of what a batch could need, at least 768.", at_least(0))


@dataclasses.dataclass(frozen=True)
class OnlineChecks:
    """What a failed check of online_dpo leads to: a warning, or the end of the run."""

    sampler_gap: str = field("warn", "At step 0, the sampler's log-probabilities are not the trainer's.",
                             one_of("warn", "stop"))
    finite_gradients: str = field("warn", "A gradient is not finite; its update is left out in any case.",
                                  one_of("warn", "stop"))


@dataclasses.dataclass(frozen=True)
class OnlineDpo:
    """Direct preference optimisation on the policy's own fresh pairs, labelled as they come. The loss is that of `dpo`."""

    iterations: int = field(40, "Rounds of sampling, labelling and learning.", at_least(1))
    prompts: int = field(2000, "Distinct prompts to sample from; the loader goes round them.", at_least(1))
    batch: int = field(64, "Prompts of an iteration, each answered twice.", at_least(1))
    epochs: int = field(1, "Passes over the pairs of an iteration.", at_least(1))
    minibatches: int = field(1, "Optimizer steps a pass; sampling is in as many parts.", at_least(1))
    reference: str = field("start", "The reference: the weights this stage starts from, or the policy at the start of the "
                           "iteration (iterative DPO). dpo.reference=none comes first.", one_of("start", "iteration"))
    temperature: float = field(1.0, "Sampling temperature.", above(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    max_new_tokens: int = field(60, "Longest answer.", at_least(1))
    sampler_tolerance: float = field(1e-3, "Largest gap of a token's log-prob between sampler and trainer.", above(0))
    checks: OnlineChecks = section(OnlineChecks(), "What a failed check leads to.")
    optimizer: Optimizer = section(Optimizer(learning_rate=2e-4, schedule="linear"), "Its optimizer.")
    checkpoint_every: int = field(5, "Iterations between checkpoints.", at_least(1))


@dataclasses.dataclass(frozen=True)
class Reward:
    """What RL is rewarded by."""

    source: str = field("preference", "preference (the preference model), distilled (its small student), model (a reward model "
                        "from outside), callable (your own), verifier (the wanted answer), ai_feedback (the base's rating), "
                        "or a sum of these, as in preference+callable; docs/rewards.md.",
                        sum_of(*REWARD_SOURCES))
    weights: tuple[float, ...] = field((), "Weight of each part of a sum, in its order; empty: 1 each.")
    length_coef: float = field(0.0, "What a token beyond length_free costs.", at_least(0))
    length_free: int = field(0, "Tokens of a response that cost nothing.", at_least(0))
    model: str = field("", "For model: folder of a ...ForSequenceClassification with one label, in Hugging Face layout, with "
                       "its own tokenizer.")
    model_style: str = field("auto", "For model: how dialogues are written for it; auto: its chat template where there is one, "
                             "else hh.", one_of("auto", "chat", "hh", "compact"))
    model_max_length: int = field(0, "For model: tokens it reads at most, longer dialogues lose their oldest turns; 0: all its "
                                  "positions.", at_least(0))
    model_batch: int = field(16, "For model: texts in one forward pass, made a multiple of what the mesh splits.", at_least(1))
    model_dtype: str = field("float32", "For model: type of its parameters and activations.", one_of("float32", "bfloat16"))
    model_shift: float = field(0.0, "For model: taken off its raw score.")
    model_scale: float = field(1.0, "For model: what the shifted score is divided by; ppo.score_clip then clips it.", above(0))
    callable: str = field("", "For callable: 'package.module:function' or 'FILE.py:function', called as "
                          "(prompts, responses, **columns) -> scores.")
    verifier: str = field("number_match", "For verifier: the last number is the answer's, the text is the answer, or a "
                          "pattern is found (columns answer, answer and pattern).",
                          one_of("number_match", "exact_match", "regex_match"))
    principles: int = field(1, "For ai_feedback: principles drawn a response; their ratings are averaged.", at_least(1))
    while_sampling: bool = field(False, "For callable and verifier: called with the responses that have ended while others are "
                                        "sampled, a few at a time; for one that judges each by itself.")
    retries: int = field(2, "Further calls after one that fails.", at_least(0))
    timeout_s: float = field(60.0, "Seconds after which a call has failed.", above(0))
    backoff_s: float = field(1.0, "Seconds before the first retry; twice as many before each further one.", at_least(0))
    max_dropped_share: float = field(0.5, "Share of a batch without a score above which the run stops.", between(0.0, 1.0))


@dataclasses.dataclass(frozen=True)
class Checks:
    """What a failed check of RL leads to: a warning, the end of the run, or old log-probabilities computed again."""

    ratio: str = field("warn", "The ratio before an iteration's first update is not 1.", one_of("warn", "recompute", "stop"))
    reference_kl: str = field("warn", "At step 0, a KL to the equal reference.", one_of("warn", "stop"))
    sampler_gap: str = field("warn", "The sampler's log-probabilities are not the trainer's.",
                             one_of("warn", "recompute", "stop"))
    micro_batches: str = field("warn", "At step 0, loss or gradients depend on the micro-batches.", one_of("warn", "stop"))
    finite_gradients: str = field("warn", "A gradient is not finite; its update is left out in any case.",
                                  one_of("warn", "stop"))


@dataclasses.dataclass(frozen=True)
class Ppo:
    """Reinforcement learning against config.reward: PPO, and its relatives without a critic."""

    iterations: int = field(28, "Rounds of sampling and learning.", at_least(1))
    prompts: int = field(2000, "Distinct prompts to sample from; the loader goes round them.", at_least(1))
    batch: int = field(64, "Responses of an iteration.", at_least(1))
    group_size: int = field(1, "Responses to each prompt of an iteration; rloo and grpo need at least 2.", at_least(1))
    max_new_tokens: int = field(56, "Longest response.", at_least(1))
    temperature: float = field(0.7, "Sampling temperature; log-probabilities are taken under it everywhere.", above(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    epochs: int = field(2, "Passes over the rollout buffer, freshly shuffled each.", at_least(1))
    minibatches: int = field(2, "Optimizer steps a pass.", at_least(1))
    micro_batch_tokens: int = field(0, "Most tokens, of prompts and responses packed together, that a device computes at once; "
                                    "results are the same. 0: a sixteenth of what they could need, at least 768.", at_least(0))
    advantages: str = field("gae", "With a critic: gae, reinforce (returns less the value), vtrace; without one: rloo, grpo, "
                            "reinforce_pp, remax.",
                            one_of(*ADVANTAGES_WITH_CRITIC, "rloo", "grpo", "reinforce_pp", "remax"))
    critic: str = field("separate", "Where there is a critic: a model of its own, or a value head on the policy's trunk.",
                        one_of("separate", "shared"))
    group_scale: str = field("std", "grpo: divide by the group's standard deviation, or not (Dr. GRPO).",
                             one_of("std", "none"))
    skip_equal_groups: bool = field(False, "Leave out groups whose scores are all equal (DAPO), in the counts too.")
    gamma: float = field(1.0, "Discount (gae, reinforce, vtrace, reinforce_pp).", between(0.0, 1.0))
    lam: float = field(0.95, "Lambda of generalised advantage estimation (gae, vtrace).", between(0.0, 1.0))
    policy_loss: str = field("clip", "PPO's clipped ratio, GSPO's of whole responses, CISPO's clipped weight, or plain "
                             "REINFORCE.", one_of("clip", "gspo", "cispo", "plain"))
    clip: float = field(0.2, "The policy's ratio is clipped to 1 - clip .. 1 + clip.", above(0))
    clip_high: float | None = field(None, "The ratio's upper bound is 1 + clip_high; None: clip.", above(0))
    dual_clip: float | None = field(None, "For negative advantages the ratio counts as at most this (clip); None: no limit.",
                                    above(1))
    aggregation: str = field("token_mean", "How the losses of tokens become one number: docs/ppo.md.",
                             one_of("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant"))
    entropy_coef: float = field(0.0, "Weight of the entropy bonus.", at_least(0))
    value_clip: float | None = field(0.2, "How far a value may move from the rollout's; None: no limit.",
                                     at_least(0))
    value_loss: str = field("squared", "The critic's loss: half the square, or Huber's.", one_of("squared", "huber"))
    huber_delta: float = field(1.0, "Where Huber's loss turns from square to line (value_loss=huber).", above(0))
    value_coef: float = field(0.1, "Weight of the value loss.", at_least(0))
    critic_warmup: int = field(0, "Iterations at the start in which the critic alone learns.", at_least(0))
    kl_in: str = field("reward", "The KL penalty is taken off the reward, or added to the loss.", one_of("reward", "loss"))
    kl_coef: float = field(0.15, "Weight of the KL penalty; its start where adaptive.", at_least(0))
    kl_controller: str = field("fixed", "Keep kl_coef, or steer it towards kl_target.", one_of("fixed", "adaptive"))
    kl_target: float = field(6.0, "KL aimed at, in nats a response (kl_controller=adaptive).", above(0))
    kl_horizon: int = field(10_000, "Responses over which the controller acts (kl_controller=adaptive).", at_least(1))
    kl_estimator: str = field("k1", "A token's KL penalty: log-ratio, its size, half its square, r - 1 - log r, or the "
                              "KL over the whole vocabulary.", one_of("k1", "abs", "k2", "k3", "full"))
    whiten_advantages: bool = field(True, "Advantages get mean 0 and deviation 1 over the whole minibatch.")
    missing_eos: str = field("replace", "Without an end: leave the score, replace it by missing_eos_value, subtract "
                             "that value, or score zero.", one_of("none", "replace", "penalty", "zero"))
    missing_eos_value: float = field(-1.0, "The score (replace) or what is subtracted from it (penalty).")
    overlong_buffer: int = field(0, "The last so many tokens below max_new_tokens cost up to 1 (DAPO); 0: nothing.",
                                 at_least(0))
    score_clip: float | None = field(None, "Scores are clipped to +-score_clip; None: not at all.", above(0))
    target_kl: float | None = field(None, "An iteration stops learning above this KL; None: never.", above(0))
    sampler_correction: str = field("none", "Losses are weighted by trainer / sampler probability: not at all, up to "
                                    "correction_cap, or with 0 beyond it.", one_of("none", "truncate", "mask"))
    correction_level: str = field("token", "That weight is a token's own, a response's, or its geometric mean.",
                                  one_of("token", "sequence", "geometric"))
    correction_cap: float = field(2.0, "The largest weight of the correction.", above(0))
    sampler_tolerance: float = field(1e-3, "Largest gap of a token's log-prob between sampler and trainer, and of the first "
                                     "ratio from 1.", above(0))
    checks: Checks = section(Checks(), "What a failed check leads to.")
    optimizer: Optimizer = section(Optimizer(learning_rate=3e-4, schedule="linear", eps=1e-5), "The policy's.")
    critic_optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear", eps=1e-5), "The critic's.")
    checkpoint_every: int = field(5, "Iterations between checkpoints.", at_least(1))


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Gold measures, win rates, KL and length, on held-out prompts."""

    prompts: int = field(512, "Prompts answered by each model.", at_least(1))
    batch: int = field(128, "Prompts of a chunk; as many rows decode together. Up to 4 chunks are one queue.", at_least(1))
    temperature: float = field(0.7, "Sampling temperature; 0 is greedy.", at_least(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    max_new_tokens: int = field(60, "Longest answer.", at_least(1))
    win_rate_prompts: int = field(128, "Prompts on which the labeller compares models; 0: none.", at_least(0))
    examples: int = field(12, "Prompts shown in the report, answered by each model.", at_least(0))


@dataclasses.dataclass(frozen=True)
class Tracking:
    """Where the metrics of training go beside each stage's metrics.jsonl."""

    trackers: tuple[str, ...] = field((), "Trackers that receive every step: registered names, or 'package.module:name' or "
                                      "'FILE.py:name' of a class with the methods start, log and finish.")


@dataclasses.dataclass(frozen=True)
class Config:
    """All of a run's settings."""

    seed: int = field(0, "Every random number of the run follows from it.", between(0, 2**31 - 1))
    stages: tuple[str, ...] = field(DEFAULT_STAGES, "The stages to run, in this order.", some_of(*STAGES))
    compile_cache: str | None = field("", "Folder of compiled programs; empty: ~/.cache/jaxalign, None: off.")
    profile: str = field("", "Steps to trace, as STAGE:STEP:COUNT (ppo:10:3), into the stage's folder `profile`; empty: none.")
    mesh: Mesh = section(Mesh(), "")
    model: Model = section(Model(), "")
    lora: Lora = section(Lora(), "")
    data: Data = section(Data(), "")
    world: World = section(World(), "")
    arithmetic: Arithmetic = section(Arithmetic(), "")
    pretrain: Pretrain = section(Pretrain(), "")
    revise: Revise = section(Revise(), "")
    sft: Sft = section(Sft(), "")
    feedback: Feedback = section(Feedback(), "")
    compare: Compare = section(Compare(), "")
    preference: Preference = section(Preference(), "")
    reward_distill: RewardDistill = section(RewardDistill(), "")
    best_of_n: BestOfN = section(BestOfN(), "")
    dpo: Dpo = section(Dpo(), "")
    online_dpo: OnlineDpo = section(OnlineDpo(), "")
    reward: Reward = section(Reward(), "")
    ppo: Ppo = section(Ppo(), "")
    evaluate: Evaluate = section(Evaluate(), "")
    tracking: Tracking = section(Tracking(), "")


def default_config() -> config_dict.ConfigDict:
    """The defaults, for a config file to change. It takes any key and any type; they are checked when it is read."""
    return config_schema.to_config_dict(Config())


def from_config_dict(values: config_dict.ConfigDict | dict[str, Any]) -> Config:
    """The frozen, typed config. What `values` leaves out keeps its default.

    Raises:
        UserError: an unknown key, an ill type, a value out of range, or values that do not fit together.
    """
    config = config_schema.from_mapping(Config(), values)
    config_checks.check(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The config as nested dictionaries of JSON values; `from_config_dict` takes it back."""
    return config_schema.to_plain(config)


if __name__ == "__main__":
    from jaxalign import config_reference

    print(config_reference.markdown(Config()), end="")
