"""Dialogues as text and token ids: parsing, chat templates and the compact markers of the embedded world."""
