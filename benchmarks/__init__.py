"""Benchmarks of rankwire against its peers. Start with ``python -m benchmarks.run --help``."""
