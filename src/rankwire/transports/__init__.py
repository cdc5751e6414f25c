"""Bytes between two processes: sockets, TLS, memory, shared memory, and how threads wait for them.

A transport may import ``wire`` and the modules without a folder. It knows no frames' meaning, no
ranks and no connections: bytes go in and come out, and a wait has a deadline.
"""
