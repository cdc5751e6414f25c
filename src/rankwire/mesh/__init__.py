"""All connections of one process: its peers, how it dials them, call ports, large messages.

A mesh may import ``links``, ``rendezvous``, ``observe`` and the layers below them. It knows
world ranks only. It must not know groups, nor what a call or a collective means.
"""
