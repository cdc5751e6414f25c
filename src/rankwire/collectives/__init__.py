"""Collectives: operations in which all ranks of a group take part, on any backend.

From the user's call down: ``operations``, ``objects`` and ``coalesced`` check arguments;
``sequence`` numbers the operations and runs each (``operation``) in the caller's thread or in the
``background``; ``selection`` chooses an algorithm; ``algorithms`` have the steps, and see only the
rank, size, send and receive of an ``exchange``.
"""
