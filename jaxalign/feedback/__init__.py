"""The constitution, critique and revision, and the labeller."""
