"""Collectives: operations in which all ranks of a group take part, on any backend.

From the user's call down: ``operations``, ``objects`` and ``coalesced`` check arguments and return
the steps; ``sequence`` numbers the operations and runs each (``operation``) in the caller's thread
or in the ``background``; the steps call ``selection``, which chooses an algorithm; ``algorithms``
(messages), ``slot_algorithms`` (shared memory) and ``host_algorithms`` (both) see only an
``exchange``. May import backends and what is below; must not know a concrete backend.
CONTRIBUTING.md says how to add one.
"""
