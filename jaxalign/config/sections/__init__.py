"""The sections of the config, one module each, with fields and checks."""
