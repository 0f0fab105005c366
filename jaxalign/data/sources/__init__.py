"""Where prompts, answers and comparisons come from: files and generated problems."""
