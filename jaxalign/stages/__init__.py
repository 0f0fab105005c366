"""One file per stage: what it reads, what it writes, what it runs. `jaxalign.stages.<name>.STAGE` is the stage."""
