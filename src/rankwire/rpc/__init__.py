"""Calls between ranks: the agent, its calling and its serving side, futures and the registry.

``rpc`` may import ``backends`` and everything below it. It knows call ports and messages; it must
not know transports, sockets, a concrete backend, or collectives.
"""
