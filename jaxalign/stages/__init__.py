"""One module per stage: its record, its inputs, its work and its outputs."""
