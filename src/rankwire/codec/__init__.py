"""Python values as bytes and back, without running anything that a sender chose.

Nothing in this package touches a socket, a thread, a clock or a file, and nothing in it knows
frames or connections: values go in, buffers come out, and the other way round.
"""
