"""World makers close what they open, and the suite finds a backend that is wrong."""

import pytest

from rankwire import SimulatedBackend
from rankwire.testing import check_backend, simulated_world, sub_world, tcp_world


@pytest.mark.parametrize("make", [simulated_world, tcp_world, sub_world(simulated_world)])
def test_worlds_are_closed_at_the_end(make):
    with make(2, timeout=5.0) as world:
        assert [backend.rank for backend in world] == [0, 1]
        assert not any(backend.closed for backend in world)
    assert all(backend.closed for backend in world)


def test_check_backend_names_the_check_that_fails():
    class Forgetful(SimulatedBackend):
        def __init__(self, mesh):
            super().__init__(mesh)
            self._transmit, self.messages.transmit = self.messages.transmit, self._forget

        def _forget(self, dst, envelope, message, deadline):
            if message[1] != 7:
                self._transmit(dst, envelope, message, deadline)

    from contextlib import contextmanager

    @contextmanager
    def make(world_size, **options):
        world = Forgetful.create_group(world_size, **{"timeout": 0.3, **options})
        try:
            yield world
        finally:
            for backend in world:
                backend.close()

    with pytest.raises(BaseException) as info:
        check_backend(make)
    assert "messages_have_any_length" in info.value.__notes__[-1]
