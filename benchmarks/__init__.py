"""Benchmarks of the proxy: `overhead.py`, `append.py` and `transparent.py` are the programs to run."""
