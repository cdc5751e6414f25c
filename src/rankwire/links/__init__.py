"""Connections between two processes: how one is opened, written, read and waited for.

Everything that touches a socket after the rendezvous is here. This package knows frames and
deadlines; it does not know ranks' roles, backends or calls.
"""
