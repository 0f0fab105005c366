"""Data sources: sums as prompts with answers, and questions with a better and a worse answer."""

from jaxalign.data.sources.base import Split
from jaxalign.records import Comparison, Message, Prompt
from jaxalign.registry.data_sources import DataSourceRecord


class Sums:
    """Sums a + b, generated when they are read."""

    def __init__(self, begin, end):
        self.begin, self.end = begin, end

    def __len__(self):
        return self.end - self.begin

    def __getitem__(self, index):
        a, b = divmod(self.begin + index, 10)
        return Prompt(f"sum-{a}-{b}", (Message("user", f"{a}+{b}"),), "sums", {"answer": a + b})


def comparisons(inputs):
    prompts = [Prompt(f"q{i}", (Message("user", f"which is larger, {i} or {i + 1}?"),), "own") for i in range(20)]
    return [Comparison(prompt, str(i + 1), str(i), label=1.0) for i, prompt in enumerate(prompts)]


SUMS = DataSourceRecord("sums", prompts=lambda inputs: Split(Sums(0, 90), Sums(90, 100)), answers=True)
LARGER = DataSourceRecord("larger", text="jaxalign.data.sources.generated:world_text", comparisons=comparisons)
