"""The first config, prompts and constitution for a model folder of the user's own: what `jaxalign init` checks and writes."""
