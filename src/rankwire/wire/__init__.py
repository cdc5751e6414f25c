"""The protocol as pure logic: frames, matching, handshake and seals.

It may import ``codec``, and no module that touches a socket, thread, clock or file.
"""
