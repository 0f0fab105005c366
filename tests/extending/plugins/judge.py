"""A rule-based judge: shorter answers are better."""

from jaxalign.feedback.judge import Rating, Text, Verdict


class Brevity:
    def critique(self, requests, draw):
        return [Text(f"{len(r.response)} characters are too many.") for r in requests]

    def revise(self, requests, draw):
        return [Text(r.response[: len(r.response) // 2]) for r in requests]

    def compare(self, requests, draw):
        return [Verdict(0.9 if len(r.first) < len(r.second) else 0.1) for r in requests]

    def rate(self, requests, draw):
        return [Rating(max(1.0, 10.0 - len(r.response) / 10)) for r in requests]


class WrongCount:
    def compare(self, requests, draw):
        return [0.5]


class NotANumber:
    def compare(self, requests, draw):
        return [float("nan")] * len(requests)
