"""One connection between two processes: its handshake, its writer, its reader and lent memory.

A link may import ``transports``, ``wire`` and the modules without a folder. It knows frames and
deadlines. It knows nothing of ranks' roles, groups, backends or calls.
"""
