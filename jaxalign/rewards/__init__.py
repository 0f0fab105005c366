"""Rewards for RL: learnt models, functions, verifiers, ratings and sums of these."""
