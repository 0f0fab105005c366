"""Reads runs while they go on, from any process that sees their work directories: state, progress, rates, alerts."""
