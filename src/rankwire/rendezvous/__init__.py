"""Form a world: launchers' variables, secrets, the coordinator and the control connections.

May import ``links``, ``transports``, ``wire`` and the top-level modules; must not know meshes,
backends or calls.
"""
