"""What a rank does, and why it failed: status, stacks, tracebacks, blame, the report at its exit.

Everything here may import ``wire`` and the modules without a folder. It looks at values that it is
given: it must not know connections or backends, and it never waits.
"""
