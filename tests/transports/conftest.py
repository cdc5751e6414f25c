"""The fixtures of both folders that test what carries bytes."""

from connected import cleanup, connections, lending, link, make_link, make_pair, sockets, transport

__all__ = [
    "cleanup",
    "connections",
    "lending",
    "link",
    "make_link",
    "make_pair",
    "sockets",
    "transport",
]
