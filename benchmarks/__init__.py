"""What the proxy costs, measured: `python benchmarks/overhead.py`."""
