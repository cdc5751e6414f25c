"""Places to listen at: what users write, and the socket that follows from it.

A place is ``host``, ``host:port``, ``host:low-high`` or ``:low-high``; the host is an address, a
name, or a network interface such as ``eth1``. What is left out is chosen.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from rankwire import runtime
from rankwire.errors import ConfigurationError
from rankwire.transports.sockets import TcpAddress, listen_tcp, start_listening

_SIOCGIFADDR = 0x8915
_IFREQ_NBYTES = 256
_ADDRESS_OFFSET = 20


@dataclass(frozen=True, slots=True)
class ListeningPlace:
    """Where to listen; an empty host and port 0 are chosen when it is listened there."""

    host: str = ""
    low: int = 0
    high: int = 0

    @classmethod
    def parse(cls, text: str) -> ListeningPlace:
        """Parse what users write.

        Raises:
            ConfigurationError: It is not of that form.
        """
        host, separator, ports = text.rpartition(":")
        if not separator or text.endswith("]") or (":" in host and not host.endswith("]")):
            host, ports = text, "0"  # a bare host; also a bare IPv6 address
        low, dash, high = ports.partition("-")
        first, last = _port(low, text), _port(high if dash else low, text)
        if first > last:
            raise ConfigurationError(f"the ports of {text!r} are none: write low-high")
        return cls(_interface_address(host.strip("[]")), first, last)

    @property
    def specific_host(self) -> str:
        """The host, unless it stands for all interfaces: then others cannot connect to it."""
        return "" if self.host in ("0.0.0.0", "::") else self.host


def listen_somewhere(place: ListeningPlace, host: str) -> runtime.Socket:
    """Listen at the first free port of a place.

    Args:
        place: Where.
        host: The address to take if the place names none.

    Raises:
        ConfigurationError: No port is free, or the address is not one of this host.
    """
    host = place.host or host
    trouble: ConfigurationError | None = None
    for port in range(place.low, place.high + 1):
        try:
            sock = listen_tcp(TcpAddress(host, port))
        except ConfigurationError as error:
            trouble = error
            continue
        try:
            start_listening(sock)  # of two that have bound a port, one succeeds here
        except OSError as error:
            sock.close()
            trouble = ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}")
            continue
        return sock
    assert trouble is not None
    if place.low != place.high:
        raise ConfigurationError(
            f"no port from {place.low} to {place.high} can be listened at ({trouble.message})"
        ) from trouble
    raise trouble


def _port(text: str, whole: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ConfigurationError(
            f"a place to listen at is written host, host:port or host:low-high, not {whole!r}"
        )
    return int(text)


def _interface_address(host: str) -> str:
    """Return the IPv4 address of a network interface; anything else as it is."""
    if not host or host not in (name for _, name in runtime.if_nameindex()):
        return host
    request = struct.pack(f"{_IFREQ_NBYTES}s", host.encode()[:15])
    with runtime.Socket(runtime.AF_INET, runtime.SOCK_DGRAM) as probe:
        try:
            answer = runtime.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            raise ConfigurationError(
                f"the network interface {host} has no IPv4 address: {error.strerror}"
            ) from error
    return runtime.inet_ntoa(answer[_ADDRESS_OFFSET : _ADDRESS_OFFSET + 4])
