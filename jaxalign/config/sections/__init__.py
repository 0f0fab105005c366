"""The sections of the config: one module each, with its fields and its check."""
