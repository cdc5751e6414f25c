"""Collectives and bulk messages against torch Gloo and Open MPI.

Start with ``python -m benchmarks.collectives.run --help``.
"""
