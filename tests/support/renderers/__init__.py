"""Models whose prompts vLLM renders with Python of its own: checkpoints, the engine's renderers, stand-ins."""
