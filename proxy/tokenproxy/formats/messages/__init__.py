"""`POST /v1/messages`, Anthropic's wire format, served as chat turns."""
