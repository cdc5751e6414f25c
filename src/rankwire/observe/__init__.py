"""Report what a rank does, and why it failed: status, stacks, tracebacks, blame.

May import ``wire`` and the top-level modules. Knows no connections or backends, and never waits.
"""
