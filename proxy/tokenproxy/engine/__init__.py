"""Clients for one vLLM, over HTTP or in its own process. Independent of conversations and client formats."""
