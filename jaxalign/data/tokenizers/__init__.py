"""Tokenizers: SentencePiece models and tokenizer.json files behind one interface."""
