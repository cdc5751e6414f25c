"""A TCP proxy between two ranks, which does to the stream what a bad network does.

A *toxic* turns the stream of one direction into another one. It is a generator function of the
pieces that come in, and of the ``Flow`` that they pass; what it yields goes out, and it counts
bytes from the beginning of the connection. ``raise Cut`` ends both directions, ``raise Reset`` with
a reset. Everything is decided by byte counts, nothing by chance or by the clock, so a run is the
same each time::

    with Proxy(target, up=[slicer(1)]) as proxy:
        ...connect to proxy.address...

``up`` is from the one who dials to the target, ``down`` is back. Toxics are set when a connection
is made; ``reset``, ``silence`` and ``refuse`` are for now.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import msgspec

Pieces = Iterator[bytes]
Toxic = Callable[[Pieces, "Flow"], Pieces]

_READ_NBYTES = 1 << 16
_NO_LINGER = struct.pack("ii", 1, 0)


class Cut(Exception):
    """Ends the connection in good order."""


class Reset(Exception):
    """Ends the connection with a reset."""


class Flow:
    """One direction of one connection: from a socket to another one."""

    def __init__(self, source: socket.socket, target: socket.socket, toxics: list[Toxic]) -> None:
        self.source, self.target = source, target
        self.passed = 0  # bytes that have left
        self.ended = threading.Event()
        self.silent = threading.Event()
        self._toxics = toxics

    def sleep(self, seconds: float) -> None:
        """Wait, unless the connection ends meanwhile."""
        if self.ended.wait(seconds):
            raise Cut

    def run(self) -> None:
        pieces = self._read()
        for toxic in self._toxics:
            pieces = toxic(pieces, self)
        for piece in pieces:
            while self.silent.is_set():
                self.sleep(0.01)
            self.passed += len(piece)  # before: who receives it may look at once
            self.target.sendall(piece)
        if not self.ended.is_set():
            self.target.shutdown(socket.SHUT_WR)

    def _read(self) -> Pieces:
        while piece := self.source.recv(_READ_NBYTES):
            yield piece


class Proxy:
    """Listens from construction to ``close``, which also ends what it carries."""

    def __init__(
        self,
        target: tuple[str, int],
        *,
        host: str = "127.0.0.1",
        up: Iterable[Toxic] = (),
        down: Iterable[Toxic] = (),
    ) -> None:
        self.up, self.down = list(up), list(down)
        self.flows: list[tuple[Flow, Flow]] = []
        self._target = target
        self._listener = socket.create_server((host, 0))
        self._threads: list[threading.Thread] = []
        self._ending = threading.Lock()
        self._start(self._accept)

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.getsockname()[:2]

    def passed(self) -> tuple[int, int]:
        """Return the bytes that went up and down on the newest connection."""
        up, down = self.flows[-1]
        return up.passed, down.passed

    def reset(self) -> None:
        """Reset every connection at both ends."""
        for flows in self.flows:
            self._finish(flows, reset=True)

    def silence(self, *, up: bool = True, down: bool = True) -> None:
        """Let nothing pass from now on; connections stay."""
        for flow_up, flow_down in self.flows:
            if up:
                flow_up.silent.set()
            if down:
                flow_down.silent.set()

    def heal(self) -> None:
        """Let everything pass again, also what came meanwhile."""
        for flows in self.flows:
            for flow in flows:
                flow.silent.clear()

    def refuse(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        self.refuse()
        for flows in self.flows:
            self._finish(flows, reset=False)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            flows = (Flow(near, far, self.up), Flow(far, near, self.down))
            self.flows.append(flows)
            for flow in flows:
                self._start(self._carry, flow, flows)

    def _carry(self, flow: Flow, both: tuple[Flow, Flow]) -> None:
        try:
            flow.run()
            return
        except Cut:
            reset = False
        except (Reset, ConnectionError):
            reset = True
        except OSError:
            reset = False  # closed here
        self._finish(both, reset=reset)

    def _finish(self, flows: tuple[Flow, Flow], *, reset: bool) -> None:
        """End a connection. Who comes first decides how: the other thread only sees it end."""
        with self._ending:
            if flows[0].ended.is_set():
                return
            for flow in flows:
                flow.ended.set()
        _end(flows[0].source, flows[0].target, reset=reset)


def _end(*ends: socket.socket, reset: bool) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            if reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                end.shutdown(socket.SHUT_RD)  # a thread that reads it would keep it open
            else:
                end.shutdown(socket.SHUT_RDWR)
        end.close()


def between(dialler: Any, listener: int, **toxics: Any) -> Proxy:
    """Return a proxy on the way from a ``TcpBackend`` to a rank that it has not dialled yet."""
    peer = dialler.mesh.peers[listener]
    proxy = Proxy((peer.member.host, peer.member.port), host=peer.member.host, **toxics)
    host, port = proxy.address
    peer.member = msgspec.structs.replace(peer.member, host=host, port=port, unix_path="")
    return proxy


# -- toxics


def latency(seconds: float) -> Toxic:
    """Every piece comes later."""

    def toxic(pieces: Pieces, flow: Flow) -> Pieces:
        for piece in pieces:
            flow.sleep(seconds)
            yield piece

    return toxic


def bandwidth(bytes_per_second: float) -> Toxic:
    """No more than so many bytes a second."""

    def toxic(pieces: Pieces, flow: Flow) -> Pieces:
        began, sent = time.monotonic(), 0
        for piece in slicer(max(1, int(bytes_per_second / 100)))(pieces, flow):
            flow.sleep(max(0.0, began + sent / bytes_per_second - time.monotonic()))
            sent += len(piece)
            yield piece

    return toxic


def slicer(nbytes: int) -> Toxic:
    """The stream comes in pieces of this size at most."""

    def toxic(pieces: Pieces, flow: Flow) -> Pieces:
        for piece in pieces:
            for start in range(0, len(piece), nbytes):
                yield piece[start : start + nbytes]

    return toxic


def slow_close(seconds: float) -> Toxic:
    """The end of the stream comes later."""

    def toxic(pieces: Pieces, flow: Flow) -> Pieces:
        yield from pieces
        flow.sleep(seconds)

    return toxic


def limit_data(nbytes: int, *, then: type[Exception] | None = Cut) -> Toxic:
    """So many bytes pass; then the connection ends, or (None) it stays and is silent."""

    def toxic(pieces: Pieces, flow: Flow) -> Pieces:
        left = nbytes
        for piece in pieces:
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                break
        if then is None:
            flow.ended.wait()
            raise Cut
        raise then

    return toxic


def hold_after(nbytes: int, until: threading.Event) -> Toxic:
    """So many bytes pass, and the rest when something has happened."""

    def toxic(pieces: Pieces, flow: Flow) -> Pieces:
        left = nbytes
        for piece in pieces:
            if len(piece) > left:
                yield piece[:left]
                while not until.is_set():
                    flow.sleep(0.01)
                yield piece[left:]
            else:
                yield piece
            left = max(0, left - len(piece))

    return toxic


def flip_bit(offset: int, bit: int = 0) -> Toxic:
    """One bit of the byte at this place arrives wrong."""

    def toxic(pieces: Pieces, flow: Flow) -> Pieces:
        position = 0
        for piece in pieces:
            if position <= offset < position + len(piece):
                changed = bytearray(piece)
                changed[offset - position] ^= 1 << bit
                yield bytes(changed)
            else:
                yield piece
            position += len(piece)

    return toxic


def replay(start: int, stop: int) -> Toxic:
    """The bytes from ``start`` to ``stop`` come twice."""

    def toxic(pieces: Pieces, flow: Flow) -> Pieces:
        kept, position = b"", 0
        for piece in pieces:
            end = position + len(piece)
            kept += piece[max(0, start - position) : max(0, stop - position)]
            if position < stop <= end:
                yield piece[: stop - position] + kept + piece[stop - position :]
            else:
                yield piece
            position = end

    return toxic


def drop(start: int, stop: int) -> Toxic:
    """The bytes from ``start`` to ``stop`` do not come."""

    def toxic(pieces: Pieces, flow: Flow) -> Pieces:
        position = 0
        for piece in pieces:
            first, last = max(0, start - position), max(0, stop - position)
            rest = piece[:first] + piece[last:]
            if rest:
                yield rest
            position += len(piece)

    return toxic
