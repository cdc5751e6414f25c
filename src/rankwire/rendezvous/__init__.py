"""How a world forms: launchers' variables, secrets, the coordinator, a rank's connection to it.

It may import ``links``, ``transports``, ``wire`` and the top-level modules. It must not know
meshes, backends or calls. No data of the program passes through its connections.
"""
