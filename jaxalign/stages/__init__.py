"""One module per stage: its inputs, its work and its outputs. `jaxalign.stages.<name>.STAGE` is the stage."""
