"""How a world forms, and the control connections that remain.

Rank 0 coordinates: the others dial it, prove that they know the secret, say where they listen, and
get the list of all. The same connection then stays open and tells every rank who has gone. Data
never passes through it.
"""
