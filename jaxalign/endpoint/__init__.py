"""Requests to an OpenAI-compatible server: their records, their durable answers, and the client."""
