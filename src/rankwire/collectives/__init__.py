"""Collectives: operations in which all ranks of a group take part, on any backend.

``operations``, ``objects`` and ``coalesced`` check arguments and return steps; ``sequence`` numbers
and runs operations; ``selection`` chooses an algorithm, which sees only an ``exchange``. May import
``backends`` and what is below; must not know a concrete backend.
"""
