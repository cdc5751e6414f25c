"""The call ports of one rank, by service, and the callers whose agent is not there yet.

A connection that another rank's agent dials may come before this rank's agent opens its port: it
waits here, and what is written on it waits in the stream. A service that was closed lets nobody in
until it is opened again. It does not know what ports do.

Lock: ``_lock`` guards the tables; nothing else is taken under it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwire import runtime
from rankwire.errors import ChannelClosedError, ConfigurationError
from rankwire.links.connection import Connection

if TYPE_CHECKING:
    from rankwire.mesh.call_port import MeshCallPort


class Ports:
    """Which ports are open. Every method is safe from any thread."""

    def __init__(self) -> None:
        self._lock = runtime.Lock()
        self._open: dict[int, MeshCallPort] = {}
        self._closed_services: set[int] = set()
        self._waiting: dict[int, dict[int, Connection]] = {}  # by service and rank
        self._has_ended = False

    def open(self, port: MeshCallPort) -> list[Connection]:
        """Take a new port; return the connections that have waited for it.

        Raises:
            ConfigurationError: Its service has an open port already.
            ChannelClosedError: This rank has left.
        """
        with self._lock:
            if self._has_ended:
                raise ChannelClosedError("this backend is closed")
            if port.service in self._open:
                raise ConfigurationError(
                    "an agent of this name exists already; close it, or give this one another name"
                )
            self._open[port.service] = port
            self._closed_services.discard(port.service)
            return list(self._waiting.pop(port.service, {}).values())

    def forget(self, port: MeshCallPort) -> None:
        """Note that a port is closed."""
        with self._lock:
            if self._open.get(port.service) is port:
                del self._open[port.service]
                self._closed_services.add(port.service)

    def is_closed(self, service: int) -> bool:
        """Whether a service was closed, and not opened again."""
        return service in self._closed_services

    def find(
        self, service: int, connection: Connection
    ) -> tuple[MeshCallPort | None, Connection | None]:
        """Return the port that a connection is for; without one, the connection waits for it.

        Returns:
            The port, and what to close: the connection itself if its service has closed, or an
            older one of the same rank that has waited; its agent was closed since.
        """
        with self._lock:
            port = self._open.get(service)
            if port is not None:
                return port, None
            if self._has_ended or service in self._closed_services:
                return None, connection
            waiting = self._waiting.setdefault(service, {})
            older = waiting.get(connection.peer)
            waiting[connection.peer] = connection
            return None, older

    def all(self) -> list[MeshCallPort]:
        """Return those that are open."""
        with self._lock:
            return list(self._open.values())

    def end(self) -> tuple[list[MeshCallPort], list[Connection]]:
        """Open no more; return the open ports, and the connections that wait for others."""
        with self._lock:
            self._has_ended = True
            waiting = [each for parked in self._waiting.values() for each in parked.values()]
            self._waiting.clear()
            return list(self._open.values()), waiting
