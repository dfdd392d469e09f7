"""Models whose prompts vLLM renders with its own Python: checkpoints, its renderers, stand-ins for them."""
