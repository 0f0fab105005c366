"""Cards: the README.md of an exported data set or model, from the facts in a run's manifests and summaries."""
