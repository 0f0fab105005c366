"""Ratings by people: blind sheets of pairs of answers, their import, and win rates and agreement."""
