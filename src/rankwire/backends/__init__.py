"""What users hold: ``Backend``, its implementations and handles, with arguments and errors checked.

Backends may import everything below them: ``mesh``, ``rendezvous``, ``observe``, ``links``. The
implementations do not know each other, and none knows calls or collectives.
"""
