"""Sources of prompts, answers and comparisons: files and generated problems."""
