"""What tests of connections and of their writers say and read, and sockets that are full."""

import random
import time
from contextlib import suppress

from headers import pack_header
from rankwire.wire.frames import Channel
from real_time import Deadline
from worlds import PATIENCE

MIB = 1 << 20


def send(connection, payload, *, tag=0, timeout=PATIENCE, **options):
    buffers = payload if isinstance(payload, list) else [payload]
    nbytes = sum(memoryview(buffer).nbytes for buffer in buffers)
    deadline = Deadline(timeout)
    connection.send((0, Channel.MESSAGE, tag), (buffers, nbytes), deadline, **options)


def hold(connection, payload, **options):
    send(connection, payload, hold=True, **options)


def frames_of(connection):
    """Yield the frames that come, for some time."""
    deadline = Deadline(PATIENCE)
    while True:
        yield from connection.read(deadline)
        assert not deadline.expired, f"no more frames within {PATIENCE} s"


def read(connection, count=1):
    """Return the next ``count`` frames, which are all there are."""
    frames, deadline = [], Deadline(PATIENCE)
    while len(frames) < count:
        frames += connection.read(deadline)
        assert not deadline.expired, f"{len(frames)} of {count} frames within {PATIENCE} s"
    assert len(frames) == count
    return frames


def frame_bytes(payload=b"", *, channel=Channel.MESSAGE, tag=0, sequence=0):
    return pack_header((0, channel, tag), len(payload), sequence) + payload


def fill(sock):
    """Send until the connection takes not one byte more; return how many it took."""
    count, stuck = 0, 0
    while stuck < 20:
        for piece in (bytes(MIB), b"\0"):
            with suppress(BlockingIOError):
                while True:
                    count += sock.send(piece)
                    stuck = 0
        stuck += 1
        time.sleep(0.005)
    return count


def noise(nbytes, seed=0):
    return random.Random(seed).randbytes(nbytes)


class Proxied:
    """A socket of which a test replaces some methods."""

    def __init__(self, sock, **methods):
        self._sock = sock
        self.__dict__.update(methods)

    def __getattr__(self, name):
        return getattr(self._sock, name)


class ReadsItself:
    """A ``Meanwhile``: reads a connection while something cannot be sent on it."""

    def __init__(self, connection):
        self.connection = connection
        self.frames = []

    def watch(self):
        return [self.connection.stream]

    def read(self):
        frames = self.connection.read_ready()
        self.frames += frames or []
        return frames is not None
