"""Reading and writing checkpoints in the Hugging Face and Orbax layouts."""
