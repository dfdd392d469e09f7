"""Talk to one vLLM: over HTTP, or in its own process. Knows nothing of conversations or clients' formats."""
