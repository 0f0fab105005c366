"""Trainers: supervised fine-tuning, reward models, direct preference objectives and RL as objects, with or without a stage."""
