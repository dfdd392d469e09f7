"""`tokenproxy top`: a live view of a running proxy in the terminal, read from its own routes."""
