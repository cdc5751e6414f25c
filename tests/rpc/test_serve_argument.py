"""``RpcAgent(serve=...)``: what is registered before any other rank can call."""

import pytest

from rankwire import ConfigurationError, FunctionNotFoundError, RpcAgent
from rankwire.backends.simulated import SimulatedBackend


class Base:
    def reset(self):
        return "reset"

    def save(self):
        return "saved"


class Rollout(Base):
    def __init__(self):
        self.setting = 3

    def step(self, n):
        return n + self.setting

    async def wait(self):
        return "waited"

    @staticmethod
    def version():
        return 1

    def reset(self):
        return "reset here"

    def _private(self):
        return "private"


class Callable(Base):
    """A callable object with methods, as a ``torch.nn.Module`` is."""

    def __call__(self, x):
        return x

    def forward(self, x):
        return [x]


class OnlyInherits(Base):
    pass


@pytest.fixture
def world():
    world = SimulatedBackend.create_group(2, timeout=10.0)
    yield world
    for backend in world:
        backend.close()


def serve(world, served):
    return RpcAgent(world[0]), RpcAgent(world[1], serve=served)


def test_an_objects_own_public_methods_are_served(world):
    caller, callee = serve(world, {"rollout": Rollout()})
    names = ["rollout.reset", "rollout.step", "rollout.version", "rollout.wait"]
    assert callee.functions() == names
    rollout = caller.to(1).rollout
    assert rollout.step(4) == 7
    assert rollout.reset() == "reset here"
    assert rollout.wait() == "waited"
    with pytest.raises(FunctionNotFoundError):
        rollout.save()


def test_listed_methods_are_served_also_inherited_ones(world):
    caller, callee = serve(world, {"rollout": (Rollout(), ["step", "save"])})
    assert callee.functions() == ["rollout.save", "rollout.step"]
    assert caller.to(1).rollout.save() == "saved"


def test_functions_and_callable_objects_are_served_by_their_name(world):
    served = {"add": lambda a, b: a + b, "same": Callable(), "both": (Callable(), ["forward"])}
    caller, callee = serve(world, served)
    assert callee.functions() == ["add", "both.forward", "same"]
    assert caller.to(1).add(1, 2) == 3
    assert caller.to(1).same(4) == 4
    assert caller.to(1).both.forward(5) == [5]


def test_what_is_served_can_be_registered_again_and_removed(world):
    _, callee = serve(world, {"rollout": Rollout()})
    with pytest.raises(ConfigurationError, match="registered already"):
        callee.register("rollout", Rollout())
    callee.register("rollout", Rollout(), replace=True)
    assert "rollout.save" in callee.functions()  # register also takes inherited methods
    callee.unregister("rollout")
    assert callee.functions() == []


@pytest.mark.parametrize(
    ("served", "words"),
    [
        ({"rollout": (Rollout(), ["stop"])}, "Rollout has no public method 'stop'"),
        ({"rollout": (Rollout(), ["_private"])}, "no public method '_private'"),
        ({"rollout": (Rollout(), [])}, "cannot be registered"),
        ({"rollout": OnlyInherits()}, r"only inherits .* serve={name: \(object, \['reset'\]\)}"),
        ({"three": 3}, "cannot be registered"),
        ({"": Rollout()}, "printable text"),
        ({7: Rollout()}, "printable text"),
    ],
)
def test_what_cannot_be_served_is_refused_and_leaves_no_agent(world, served, words):
    with pytest.raises(ConfigurationError, match=words):
        RpcAgent(world[0], serve=served)
    RpcAgent(world[0])  # of the same name


def test_calls_that_wait_for_the_agent_find_its_functions(world):
    caller = RpcAgent(world[0])
    waiting = [caller.rpc_async(1, "one") for _ in range(50)]
    RpcAgent(world[1], serve={"one": lambda: 1})
    assert [each.result() for each in waiting] == [1] * 50
