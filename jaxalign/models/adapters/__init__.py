"""Low-rank adapters, quantised frozen bases and PEFT folders."""
