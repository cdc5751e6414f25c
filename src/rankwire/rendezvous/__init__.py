"""How a world forms: launchers' variables, secrets, the coordinator, a rank's connection to it.

The rendezvous may import ``links``, ``transports``, ``wire`` and the modules without a folder. It
must not know meshes, backends or calls. No data of the program passes through its connections.
"""
