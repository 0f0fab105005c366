"""Aligns a pretrained Llama on human preferences: sft, preference, ppo, evaluate, report.

With stories260K (260,032 parameters) and the harmless-base test file of HH-RLHF (2,312 pairs) it takes a few minutes on 2 CPU
cores. Give both on the command line:

    python -m jaxalign.train --config=configs/stories_hh.py \
        --config.model.path=FOLDER --config.data.train=FILE.jsonl.gz

FOLDER has config.json, model.safetensors and tokenizer.model. The model was pretrained only on children's stories, so its
answers stay incoherent; the run shows that every stage works with pretrained weights and human data.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("sft", "preference", "ppo", "evaluate", "report")

    config.model.source = "huggingface"
    config.model.path = ""
    config.model.max_length = 192  # Longer dialogues lose their oldest turns; 1,371 pairs fit.

    config.data.source = "preferences_jsonl"
    config.data.train = ""
    config.data.style = "hh"
    config.data.held_out_share = 0.1

    config.sft.epochs = 2
    config.sft.optimizer.learning_rate = 1e-3

    # With so few, noisy labels a second epoch would memorise them.
    config.preference.epochs = 1
    config.preference.members = 1
    config.preference.max_length = 192
    config.preference.optimizer.learning_rate = 3e-4

    # After 20 iterations most answers are "I'm sorry", the first thing that harmlessness labels reward.
    config.ppo.iterations = 10
    config.ppo.batch = 32
    config.ppo.max_new_tokens = 48
    config.ppo.kl_coef = 0.2
    config.ppo.optimizer.learning_rate = 3e-4

    config.evaluate.prompts = 128
    config.evaluate.batch = 32
    config.evaluate.max_new_tokens = 48
    config.evaluate.win_rate_prompts = 0  # This tokenizer lacks the labeller's markers.
    return config
