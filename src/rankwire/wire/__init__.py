"""The protocol as pure logic: frames, matching, handshake and seals.

Nothing in this package touches a socket, a thread, a clock or a file: bytes and objects go in,
bytes and objects come out.
"""
