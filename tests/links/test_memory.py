import pytest

from rankwire.links.memory import allocate


def payload_of(nbytes):
    return bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)


def test_allocate_gives_a_plain_bytearray():
    assert allocate(0) == b""
    memory = allocate(1 << 20)
    assert isinstance(memory, bytearray)
    assert len(memory) == 1 << 20
    memory[:] = payload_of(1 << 20)
    assert memory == payload_of(1 << 20)


@pytest.mark.parametrize("nbytes", [(4 << 20) - 1, 4 << 20, (9 << 20) + 4097])
def test_allocate_gives_a_plain_bytearray_also_in_huge_pages(nbytes):
    memory = allocate(nbytes)
    memory[:] = payload_of(nbytes)
    memory.extend(b"resized")  # nothing holds on to it
    assert memory == payload_of(nbytes) + b"resized"
