"""Backends: messages between ranks.

One interface (``base``), several implementations that do not know each other.
"""
