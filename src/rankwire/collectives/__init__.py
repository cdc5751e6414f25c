"""Collectives: operations in which all ranks of a group take part, on any backend.

From the user's line down: ``operations`` and ``objects`` check arguments and shapes (``calling`` is
what they share); ``selection`` picks an algorithm; ``sequence`` numbers the operations, which run
one after the other (``operation``) in the caller's thread or in the group's worker (``work``);
``algorithms`` do the steps, and see only rank, size, send and receive; ``exchange`` gives each
message the operation's envelope. What other ranks report of an operation comes from the
coordinator (``relayed_failures``).
"""
