"""Sources, tokenizers, text formats, packing and the embedded world."""
