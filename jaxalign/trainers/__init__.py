"""Trainers: supervised fine-tuning, reward models, direct preference objectives and RL, for stages and for Python callers."""
