"""Reinforcement learning, independent of stages: state, experience, update and checks."""
