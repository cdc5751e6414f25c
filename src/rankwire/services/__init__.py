"""Services: what is built of calls alone, such as streams of work over many ranks.

May import ``rpc`` and, for types, what is below. A service makes, registers and serves calls; it
must not know ports, frames, connections or a concrete backend.
"""
