"""Memory for rings: the process that was told of it opens it, and nothing else is taken for it."""

import fcntl
import os

import pytest

from rankwire.transports import shared_memory
from rankwire.transports.shared_memory import CAN_SHARE, SharedMemory, open_shared
from rankwire.wire.ring import RING_NBYTES

SIZES = range(RING_NBYTES, RING_NBYTES + 1)

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="there are rings on Linux and x86 only")


def test_memory_is_opened_by_what_its_maker_says():
    shared = SharedMemory(RING_NBYTES)
    view = open_shared(os.getpid(), shared.offer, SIZES)
    view[300] = 7
    assert shared.view[300] == 7
    shared.close()
    shared.close()
    assert view[300] == 7
    with pytest.raises(OSError):
        open_shared(os.getpid(), shared.offer, SIZES)


def offer_of(descriptor, token=0, nbytes=RING_NBYTES):
    return shared_memory._OFFER.pack(descriptor, nbytes, token)


def test_nothing_else_is_taken_for_it(tmp_path):
    pid = os.getpid()
    shared = SharedMemory(RING_NBYTES)
    number, _, token = shared_memory._OFFER.unpack(shared.offer)
    with pytest.raises(ValueError, match="token"):
        open_shared(pid, offer_of(number, token ^ 1), SIZES)
    with pytest.raises(ValueError, match="bytes"):
        open_shared(pid, offer_of(number, token, RING_NBYTES + 1), SIZES)
    with pytest.raises(ValueError, match="requires a buffer"):
        open_shared(pid, b"short", SIZES)
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(RING_NBYTES)
        with pytest.raises(ValueError, match="something else"):
            open_shared(pid, offer_of(file.fileno()), SIZES)
    for nbytes, seals, complaint in (
        (RING_NBYTES - 1, fcntl.F_SEAL_SHRINK, "size"),
        (RING_NBYTES, 0, "smaller"),
    ):
        descriptor = os.memfd_create("rankwire", os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            with pytest.raises(ValueError, match=complaint):
                open_shared(pid, offer_of(descriptor), SIZES)
        finally:
            os.close(descriptor)
    with pytest.raises(OSError):
        open_shared(pid, offer_of(1 << 20), SIZES)
    shared.close()
