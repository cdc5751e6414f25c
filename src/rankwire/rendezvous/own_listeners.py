"""Own what a rank brings to a world: its listeners, its entry among the members, and its keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from rankwire import runtime
from rankwire.errors import ConfigurationError
from rankwire.finalizers import close_at_exit
from rankwire.fork import guard
from rankwire.links.acceptor import Acceptor
from rankwire.rendezvous.runtime_dir import host_id, new_socket_path, sweep_socket_files
from rankwire.rendezvous.secret import AgreedSecret
from rankwire.transports import listen
from rankwire.transports.byte_stream import Listener
from rankwire.transports.sockets import Socket
from rankwire.transports.tcp_stream import (
    ListeningPlace,
    TcpAddress,
    listen_somewhere,
    listen_tcp,
)
from rankwire.wire.control_messages import Joined, Member, World
from rankwire.wire.keys import HiddenKey, RankKey, rank_key, unwrap, unwrap_one


class OwnListeners:
    """Listens for a rank until an acceptor does, and owns the files that it makes.

    ``advertise`` is the host by which others reach this rank, if not that of ``place``.
    ``share_files`` adds a Unix socket. ``listener`` is a bound TCP socket for rank 0 to use.
    """

    def __init__(
        self,
        rank: int,
        place: ListeningPlace,
        *,
        advertise: str | None,
        share_files: bool,
        listener: Socket | None,
    ) -> None:
        self._rank = rank
        self._place = place
        self._advertise = advertise
        self._share_files = share_files
        self._files: list[Callable[[], None]] = []  # each call removes one file
        # Until the acceptor has them.
        self._listeners: list[Socket] = [] if listener is None else [listener]
        self._local_listeners: list[Listener] = []
        self._member: Member | None = None
        guard(self)
        close_at_exit(self, OwnListeners._remove_files)

    def listen_at(self, address: TcpAddress) -> Socket:
        """Return the TCP listener of rank 0: at the place if that is set, else at the address."""
        if not self._listeners:
            place = self._place
            if place.low != place.high:
                raise ConfigurationError("rank 0 listens at the one port of its address")
            where = TcpAddress(place.host or address.host, place.low or address.port)
            self._listeners.append(listen_tcp(where))
        return self._listeners[0]

    def describe(self, host: str) -> Member:
        """Listen at the host that reached the coordinator, once, and return this rank's entry."""
        if self._member is not None:
            return self._member
        if not self._listeners:
            self._listeners.append(listen_somewhere(self._place, host))
        unix_path = ""
        if self._share_files:
            sweep_socket_files()
            unix_path = new_socket_path()
            self._local_listeners.append(listen(f"unix://{unix_path}"))
            self.own_file(partial(Path(unix_path).unlink, missing_ok=True))
        self._member = Member(
            self._rank,
            runtime.getpid(),
            self._advertise or self._place.specific_host or host,
            self._listeners[0].getsockname()[1],
            unix_path,
            host_id(),
        )
        return self._member

    def own_file(self, remove: Callable[[], None]) -> None:
        """Call ``remove`` at the end, for a file that this rank has made."""
        self._files.append(remove)

    def leave_files(self) -> None:
        """Leave the files where they are: the next world removes them."""
        self._files.clear()

    def pass_to(self, acceptor: Acceptor) -> None:
        """Let an acceptor listen and own the listeners."""
        for listener in self._all():
            acceptor.listen(listener)
        self._listeners, self._local_listeners = [], []

    def _all(self) -> list[Socket | Listener]:
        return [*self._listeners, *self._local_listeners]

    def close(self) -> None:
        """Stop listening and remove the files. Idempotent."""
        for listener in self._all():
            listener.close()
        self._remove_files()

    def close_in_child(self) -> None:
        """Close the listeners in a forked child, and leave the files to the parent."""
        self.leave_files()
        self.close()

    def _remove_files(self, error: BaseException | None = None) -> None:
        for remove in self._files:
            remove()


class OwnKeys:
    """The keys of a rank, of which ``own`` is the one with which it joins.

    ``secret`` is what the user gave; None if rank 0 writes one to a file.
    """

    def __init__(self, rank: int, secret: bytes | None) -> None:
        self._rank = rank
        self._secret = secret
        self.own = b""
        self.shared: dict[int, HiddenKey] = {}  # with each other rank

    def coordinate(self, port: int, own_file: Callable[[Callable[[], None]], None]) -> None:
        """Take the keys of the rank that coordinates; if no secret was given, write one to a file.

        ``own_file`` gets the function that removes the file.
        """
        if isinstance(self._secret, RankKey):
            raise ConfigurationError("rank 0 coordinates only with the secret that all ranks have")
        if self._secret is None:
            agreed = AgreedSecret(port)
            self._secret = agreed.publish()
            own_file(partial(agreed.remove, self._secret))
        self.own = self.of_rank(self._rank)

    def of_rank(self, rank: int) -> bytes:
        """Return the key with which a rank joins, at the rank that coordinates."""
        assert self._secret is not None
        return rank_key(self._secret, rank)

    def find(self, port: int) -> bytes | None:
        """Return the key with which this rank joins; None if rank 0 has not written a secret."""
        secret = self._secret or AgreedSecret(port).read()
        if secret is None:
            return None
        self.own = secret if isinstance(secret, RankKey) else rank_key(secret, self._rank)
        return self.own

    def take_all(self, world: World, world_size: int) -> None:
        """Take the keys that this rank shares with the others."""
        if self.own:
            self.shared = dict(unwrap(self.own, world.keys, self._rank, world_size))

    def take(self, joined: Joined) -> None:
        """Replace the key that is shared with a restarted rank."""
        self.shared[joined.member.rank] = unwrap_one(self.own, joined.key)
