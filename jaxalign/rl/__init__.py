"""Reinforcement learning without a stage around it: state, experience, update and checks."""
