"""Attention over whole rows: one dispatcher and its implementations."""
