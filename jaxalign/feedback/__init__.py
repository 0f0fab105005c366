"""AI feedback: constitutions, critique and revision, labels."""
