"""What a rank does, and why it failed: status, stacks, tracebacks, blame.

It may import ``wire`` and the top-level modules. It works on values that it is given, knows no
connections or backends, and never waits.
"""
