"""Rewards for RL: learned models, functions, verifiers, ratings and sums of these."""
