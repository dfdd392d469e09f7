"""Benchmarks of tokenproxy. `python -m benchmarks --help` describes them, `--list` shows their rows."""
