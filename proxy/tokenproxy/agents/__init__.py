"""`tokenproxy run` and `tokenproxy env`: coding agents and other programs, pointed at a running proxy."""
