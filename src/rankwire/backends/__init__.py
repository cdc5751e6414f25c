"""What users hold: ``Backend``, its implementations and handles, with arguments and errors checked.

Backends may import everything below them: ``mesh``, ``rendezvous``, ``observe``, ``links``. The
implementations must not know each other, nor calls or collectives.
"""
