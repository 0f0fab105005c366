"""Compares runs: their settings and data, curves, rates, answers to the same prompts, and times."""
