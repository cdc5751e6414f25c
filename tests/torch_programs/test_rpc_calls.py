"""torch RPC: calls of functions by name, their futures, values, errors and time limits."""

import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from rpc_ranks import on_first, run_workers, worker  # noqa: E402

import rankwire.torch.rpc as rpc  # noqa: E402
from rankwire.clock import REAL_TIME  # noqa: E402
from rankwire.errors import (  # noqa: E402
    DeadlineExceededError,
    FunctionNotFoundError,
    PeerLostError,
    RemoteError,
    UnsupportedTypeError,
)
from rankwire.torch.rpc import constants, session  # noqa: E402
from rankwire.torch.rpc.call_results import ReplyWatcher  # noqa: E402
from rankwire.torch.rpc.options import construct_rpc_backend_options  # noqa: E402
from rankwire.torch.rpc.session import current  # noqa: E402
from rankwire.torch.rpc.verbs import APPLY, MAKE  # noqa: E402
from worlds import eventually  # noqa: E402

ALLOW = [__name__]


def identity(value):
    return value


def add(a, b=0):
    return a + b


def with_timeout(*, timeout):
    return timeout


def make_module():
    return torch.nn.Linear(1, 1)


def fail(text="expected"):
    raise ValueError(text)


class OwnError(Exception):
    pass


class FussyError(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)


def fail_in_own_way():
    raise OwnError("mine")


def fail_fussily():
    raise FussyError(1, 2)


def fail_to_the_end():
    raise SystemExit("bye")


def describe(tensor):
    return list(tensor.stride()), tensor.requires_grad, tensor.is_leaf, str(tensor.layout)


def apply(function, *args):
    return function(*args)


def sleep_until(path):
    while not os.path.exists(path):
        time.sleep(0.01)


def wait_forever():
    threading.Event().wait()


released = threading.Event()


def wait_for_release():
    released.wait()


def release():
    released.set()


def name_here():
    return rpc.get_worker_info().name


def relay(to, function, *args):
    return rpc.rpc_sync(to, function, args=args)


@rpc.functions.async_execution
def add_there(to, a, b):
    return rpc.rpc_async(to, add, args=(a, b))


@rpc.functions.async_execution
def add_there_and_one(to, a, b):
    return rpc.rpc_async(to, add, args=(a, b)).then(lambda future: future.wait() + 1)


@rpc.functions.async_execution
def fail_later(to):
    return rpc.rpc_async(to, fail).then(lambda future: future.wait())


@rpc.functions.async_execution
def no_future():
    return 1


class Batch:
    """Callers wait until there are enough of them; then all get the sum."""

    lock = threading.Lock()
    waiting, numbers = [], []


@rpc.functions.async_execution
def sum_of(count, number):
    future = torch.futures.Future()
    with Batch.lock:
        Batch.waiting.append(future)
        Batch.numbers.append(number)
        ready = list(Batch.waiting) if len(Batch.waiting) == count else []
    for each in ready:
        each.set_result(sum(Batch.numbers))
    return future


def test_a_worker_is_called_by_name_rank_or_info_and_by_itself():
    def check():
        info = rpc.get_worker_info("worker1")
        assert info == rpc.WorkerInfo("worker1", 1)
        for to in ("worker1", 1, info):
            assert rpc.rpc_sync(to, name_here) == "worker1"
            assert rpc.rpc_async(to, name_here).wait() == "worker1"
        for to in ("worker0", 0, rpc.get_worker_info()):
            assert rpc.rpc_sync(to, name_here) == "worker0"
            assert rpc.rpc_async(to, name_here).wait() == "worker0"
        for wrong, kind in (("nobody", RuntimeError), (7, RuntimeError), (0.5, ValueError)):
            with pytest.raises(kind):
                rpc.rpc_sync(wrong, name_here)

    on_first(check)


def test_functions_take_arguments_of_every_name():
    def check():
        assert rpc.rpc_sync("worker1", add, args=(1,), kwargs={"b": 2}) == 3
        assert rpc.rpc_sync("worker1", with_timeout, kwargs={"timeout": 7}) == 7
        assert rpc.rpc_async("worker1", with_timeout, kwargs={"timeout": 7}).wait() == 7
        assert rpc.remote("worker1", with_timeout, kwargs={"timeout": 7}).to_here() == 7
        assert rpc.rpc_sync("worker1", min, args=(3, 2)) == 2
        assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
        with pytest.raises(TypeError, match="callable"):
            rpc.rpc_sync("worker1", "add")

    on_first(check)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_values_of_torch_arrive_as_they_were():
    def check():
        narrow = torch.rand(5, 5).narrow(1, 2, 2)
        turned = torch.rand(3, 4).t()
        expanded = torch.rand(3, 1).expand(3, 4)
        wanting = torch.rand(2, requires_grad=True)
        sparse = torch.eye(3).to_sparse()
        rows, columns = torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse_csc()
        assert rpc.rpc_sync("worker1", describe, args=(narrow,))[0] == list(narrow.stride())
        assert rpc.rpc_sync("worker1", describe, args=(turned,))[0] == list(turned.stride())
        assert rpc.rpc_sync("worker1", describe, args=(wanting,))[1:3] == (True, True)
        assert rpc.rpc_sync("worker1", describe, args=(wanting * 2,))[1:3] == (True, True)
        for tensor in (narrow, turned, expanded, wanting, torch.empty(0, 3).t(), torch.ones(())):
            assert torch.equal(rpc.rpc_sync("worker1", identity, args=(tensor,)), tensor)
        for tensor in (sparse, sparse.coalesce(), rows, columns):
            back = rpc.rpc_sync("worker1", identity, args=(tensor,))
            assert back.layout == tensor.layout
            assert torch.equal(back.to_dense(), tensor.to_dense())
        parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        back = rpc.rpc_sync("worker1", identity, args=(parameter,))
        assert type(back) is torch.nn.Parameter
        assert not back.requires_grad
        values = [torch.Size([2, 3]), torch.float16, torch.device("cpu"), rpc.get_worker_info()]
        assert rpc.rpc_sync("worker1", identity, args=(values,)) == values

    on_first(check)


def test_functions_and_classes_travel_by_name_under_the_same_rule():
    def check():
        assert rpc.rpc_sync("worker1", apply, args=(add, 1, 2)) == 3
        assert rpc.rpc_sync("worker1", apply, args=(torch.add, torch.ones(1), 2)).item() == 3
        assert rpc.rpc_sync("worker1", identity, args=(Batch,)) is Batch
        assert rpc.rpc_sync("worker1", identity, args=(torch.Tensor,)) is torch.Tensor
        for wrong in (os.system, time.sleep, torch.load, os.path.join):
            with pytest.raises(RuntimeError, match="refused"):
                rpc.rpc_sync("worker1", apply, args=(wrong, "true"))
        with pytest.raises(TypeError, match="top of its module"):
            rpc.rpc_sync("worker1", apply, args=(lambda: 1,))

    on_first(check)


def test_a_call_that_is_refused_says_why_and_how_to_allow_it():
    def check():
        for call in (rpc.rpc_sync, lambda *a, **k: rpc.rpc_async(*a, **k).wait()):
            with pytest.raises(RuntimeError, match=r"allow=\['posix'\]") as caught:
                call("worker1", os.system, args=("true",))
            assert isinstance(caught.value.__cause__, FunctionNotFoundError)
        with pytest.raises(RuntimeError, match="refused"):
            rpc.remote("worker1", os.system, args=("true",)).to_here()

    on_first(check)


def test_with_allow_decorated_only_what_is_exposed_can_be_called():
    def check(rank):
        if rank == 0:
            assert rpc.rpc_sync("worker1", shown) == "shown"
            assert rpc.remote("worker1", Shown).rpc_sync().method() == "method"
            with pytest.raises(RuntimeError, match="not exposed"):
                rpc.rpc_sync("worker1", identity, args=(1,))

    run_workers(2, check, allow="decorated")


@rpc.exposed
def shown():
    return "shown"


@rpc.exposed
class Shown:
    def method(self):
        return "method"


def test_what_a_function_raises_arrives_as_its_class_with_where_it_was():
    def check():
        for call in (rpc.rpc_sync, lambda *a: rpc.rpc_async(*a).wait(), made_and_fetched):
            with pytest.raises(ValueError, match="expected") as caught:
                call("worker1", fail)
            assert "WorkerInfo(id=1, name=worker1)" in str(caught.value)
            assert isinstance(caught.value.__cause__, RemoteError)
            with pytest.raises(OwnError, match="mine"):
                call("worker1", fail_in_own_way)
            with pytest.raises(RuntimeError, match="Original exception on remote side was"):
                call("worker1", fail_fussily)
            with pytest.raises(RuntimeError, match="bye"):
                call("worker1", fail_to_the_end)
        with pytest.raises(TypeError):
            rpc.rpc_sync("worker1", add, args=(1, 2, 3))

    on_first(check)


def made_and_fetched(to, function):
    return rpc.remote(to, function).to_here()


def test_an_error_goes_through_several_workers_as_itself():
    def check():
        with pytest.raises(ValueError, match="expected"):
            rpc.rpc_sync("worker1", relay, args=("worker2", fail))
        with pytest.raises(RuntimeError, match="expected"):
            rpc.rpc_sync("worker1", fail_later, args=("worker2",))

    on_first(check, size=3)


def test_what_cannot_be_sent_is_an_error_of_the_caller():
    def check():
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(
                RuntimeError, match=r"Can not pickle torch\.futures\.Future"
            ) as caught:
                call("worker1", identity, args=(torch.futures.Future(),))
            assert isinstance(caught.value.__cause__, UnsupportedTypeError)
            with pytest.raises(TypeError, match="cannot be sent"):
                call("worker1", identity, args=(object(),))
            with pytest.raises(TypeError, match=r"send its state_dict\(\), or pass pickle=True to"):
                call("worker1", identity, args=(torch.nn.Linear(1, 1),))
        with pytest.raises(RuntimeError, match="pass pickle=True to init_rpc on all ranks"):
            rpc.rpc_sync("worker1", make_module)

    on_first(check)


def test_a_time_limit_is_an_error_in_the_words_of_torch():
    def check():
        words = "RPC ran for more than"
        with pytest.raises(RuntimeError, match=words) as caught:
            rpc.rpc_sync("worker1", wait_for_release, timeout=0.1)
        assert isinstance(caught.value.__cause__, DeadlineExceededError)
        future = rpc.rpc_async("worker1", wait_for_release, timeout=0.1)
        with pytest.raises(RuntimeError, match=words):
            future.wait()
        rpc._set_rpc_timeout(0.1)
        assert rpc.get_rpc_timeout() == 0.1
        with pytest.raises(RuntimeError, match=words):
            rpc.rpc_sync("worker1", wait_for_release)
        rpc._set_rpc_timeout(0)
        assert rpc.rpc_sync("worker1", add, args=(1, 2)) == 3
        rref = rpc.remote("worker1", wait_for_release, timeout=0.1)
        with pytest.raises(RuntimeError, match=words):
            rref._get_future().wait()
        with pytest.raises(RuntimeError, match="RRef creation"):
            rref.to_here()
        rpc.rpc_sync("worker1", release)

    on_first(check)


def test_a_killed_worker_is_named_at_once():
    def check(rank):
        if rank == 1:
            wait_forever()
        future = rpc.rpc_async("worker1", wait_forever)
        os.kill(rpc.rpc_sync("worker1", os_pid), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="worker1") as caught:
            future.wait()
        assert isinstance(caught.value.__cause__, PeerLostError)
        assert time.monotonic() - began < 2
        with pytest.raises(RuntimeError, match="rank 1 is lost"):
            rpc.rpc_async("worker1", identity, args=(1,)).wait()
        rpc.shutdown()
        assert not rpc._is_current_rpc_agent_set()

    run_workers(2, check, allow=ALLOW, killed=[1])


def os_pid():
    return os.getpid()


def test_futures_are_torchs_in_every_way():
    def check():
        future = rpc.rpc_async("worker1", add, args=(1, 2))
        assert isinstance(future, torch.futures.Future)
        assert future.then(lambda done: done.wait() + 1).wait() == 4
        assert future.done()
        assert future.value() == 3
        assert future.wait() == 3
        with pytest.raises(RuntimeError, match="marked completed once"):
            future.set_result(1)
        called = torch.futures.Future()
        rpc.rpc_async("worker1", add, args=(2, 2)).add_done_callback(
            lambda done: called.set_result(done.value())
        )
        assert called.wait() == 4
        futures = [rpc.rpc_async("worker1", add, args=(n, 1)) for n in range(64)]
        assert torch.futures.wait_all(futures) == list(range(1, 65))
        futures = [rpc.rpc_async("worker1", add, args=(n, 1)) for n in range(64)]
        assert [f.wait() for f in torch.futures.collect_all(futures).wait()] == list(range(1, 65))
        bad = rpc.rpc_async("worker1", fail)
        for _ in range(2):
            with pytest.raises(ValueError, match="expected"):
                bad.wait()
        assert bad.done()
        with pytest.raises(ValueError, match="expected"):
            torch.futures.wait_all([futures[0], rpc.rpc_async("worker1", fail)])

    on_first(check)


class Call:
    """What an watcher knows of a call."""

    def __init__(self, dst):
        self.dst = dst
        self.is_done = False
        self.attended = 0

    def done(self):
        return self.is_done

    def attend(self):
        self.attended += 1


def test_replies_that_a_thread_reads_are_left_to_it_until_it_leaves():
    watcher = ReplyWatcher(REAL_TIME)
    read, unread = [Call(1) for _ in range(200)], Call(2)
    try:
        watcher.begin_reading(1)
        for call in (*read, unread):
            watcher.watch(call)
        eventually(lambda: unread.attended)
        assert not any(call.attended for call in read)
        for call in read[:-1]:
            call.is_done = True
        more = [Call(1) for _ in range(400)]
        for call in more:
            watcher.watch(call)
            call.is_done = True
        watcher.watch(last := Call(2))
        eventually(lambda: last.attended)
        assert sum(map(len, watcher._aside.values())) < 500, "what has ended is let go"
        watcher.end_reading()
        watcher.end_reading()
        eventually(lambda: read[-1].attended)
        assert [call.attended for call in read[:-1]] == [0] * 199
    finally:
        watcher.close()


gate = threading.Event()


def wait_at_gate():
    return gate.wait()


def open_gate():
    gate.set()


def test_who_waits_in_c_gets_replies_beside_one_who_waits_in_python_and_after_it():
    """The one in Python reads the replies of its rank; when it leaves, somebody else does."""

    def check():
        with ThreadPoolExecutor(3) as pool:
            held = rpc.rpc_async("worker1", wait_at_gate)
            in_python = pool.submit(held.wait)
            numbers = [rpc.rpc_async("worker1", add, args=(n, 1)) for n in range(8)]
            assert torch.futures.wait_all(numbers) == list(range(1, 9))
            assert not in_python.done()
            in_c = pool.submit(
                torch.futures.wait_all, [rpc.rpc_async("worker1", wait_at_gate) for _ in range(3)]
            )
            time.sleep(0.05)  # until they are put aside
            rpc.rpc_sync("worker1", open_gate)
            assert in_python.result(10.0)
            assert in_c.result(10.0) == [True] * 3
            for _ in range(20):
                late = rpc.rpc_async("worker1", add, args=(1, 2))
                ready = pool.submit(torch.futures.wait_all, [late])
                assert rpc.rpc_async("worker1", add, args=(2, 2)).wait() == 4
                assert ready.result(10.0) == [3]

    on_first(check)


def test_a_callback_may_make_calls_and_wait_for_them():
    def check():
        def again(done):
            return rpc.rpc_sync("worker1", add, args=(done.wait(), 10))

        assert rpc.rpc_async("worker1", add, args=(1, 2)).then(again).wait() == 13

    on_first(check)


def test_wait_all_waits_for_what_a_thread_has_started():
    def check():
        with rpc._wait_all():
            futures = [rpc.rpc_async("worker1", add, args=(n, 1)) for n in range(5)]
        assert all(future.done() for future in futures)
        with pytest.raises(ValueError, match="expected"), rpc._wait_all():
            rpc.rpc_async("worker1", fail)

    on_first(check)


def test_many_threads_call_at_once():
    def check():
        with ThreadPoolExecutor(8) as pool:
            for number in pool.map(lambda n: rpc.rpc_sync("worker1", add, args=(n, 1)), range(400)):
                assert number >= 1
            futures = list(pool.map(lambda n: rpc.rpc_async(1, add, args=(n, 1)), range(400)))
        assert torch.futures.wait_all(futures) == list(range(1, 401))

    on_first(check)


def test_a_function_may_answer_later():
    def check():
        assert rpc.rpc_sync("worker1", add_there, args=("worker2", 1, 2)) == 3
        assert rpc.rpc_sync("worker1", add_there_and_one, args=("worker2", 1, 2)) == 4
        assert rpc.rpc_async("worker1", add_there_and_one, args=("worker0", 1, 2)).wait() == 4
        assert rpc.remote("worker1", add_there_and_one, args=("worker2", 1, 2)).to_here() == 4
        with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
            rpc.rpc_sync("worker1", no_future)

    on_first(check, size=3)


def test_callers_that_wait_for_each_other_need_no_worker():
    count = 60  # far more than there are threads

    def check():
        futures = [rpc.rpc_async("worker1", sum_of, args=(count, n)) for n in range(count)]
        assert torch.futures.wait_all(futures) == [sum(range(count))] * count

    on_first(check)


def test_workers_gather_what_each_gives():
    def check(rank):
        everyone = {worker(r): r for r in range(3)}
        assert rpc._all_gather(rank) == everyone
        rpc._barrier(list(everyone))
        if rank < 2:
            assert rpc._all_gather(rank, {"worker0", "worker1"}) == {"worker0": 0, "worker1": 1}
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: rpc._all_gather(None), range(3)))
        assert rpc._all_gather(rank) == everyone

    run_workers(3, check)


def test_a_gathering_ends_when_one_does_not_come():
    def check(rank):
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"timed out in _all_gather after 0\.20 seconds"):
                rpc._all_gather(1, timeout=0.2)

    run_workers(2, check)


def test_a_gathering_names_the_worker_that_is_lost():
    def check(rank):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 2 is lost"):
            rpc._all_gather(rank)
        assert time.monotonic() - began < 5
        rpc.shutdown(graceful=False)

    run_workers(3, check, killed=[2])


def test_rpc_begins_and_ends_many_times():
    def check(rank):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="already initialized"):
                rpc.init_rpc("again", rank=rank, world_size=2)
        rpc.shutdown()
        with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
            rpc.rpc_sync("worker1", add)
        with pytest.raises(RuntimeError, match="RPC agent is not set"):
            rpc.RRef(1)

    run_workers(2, check)


def test_names_are_unique():
    def check(rank):
        rpc.shutdown()
        os.environ.update(MASTER_ADDR="127.0.0.1")
        with pytest.raises(RuntimeError, match="is not unique"):
            rpc.init_rpc("same", rank=rank, world_size=2, rpc_backend_options=again(rank))

    def again(rank):
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=20.0)
        options.init_method = PLACE
        return options

    run_workers(2, check)


PLACE = f"file:///tmp/rankwire-rpc-{os.getpid()}"


@pytest.fixture(autouse=True)
def _no_store_left():
    yield
    path = PLACE.removeprefix("file://")
    if os.path.exists(path):
        os.unlink(path)


def test_what_may_be_an_argument_is_not_called_for_that():
    def check(rank):
        if rank == 0:
            agent = current().agent
            for name, args in (
                (APPLY, (torch.Tensor, [9], {})),
                (MAKE, (0, 10**6, 0, torch.Tensor, 9)),
            ):
                with pytest.raises(RemoteError, match="did not come as a name"):
                    agent.rpc_sync(1, name, *args, timeout=5)

    run_workers(2, check)


class Thing:
    def __init__(self, value):
        self.value = value

    def plus(self, other):
        return self.value + other


def test_with_pickle_on_all_ranks_anything_travels():
    def check(rank):
        if rank == 0:
            assert rpc.rpc_sync("worker1", identity, args=(Thing(3),)).value == 3
            assert rpc.rpc_sync("worker1", Thing(3).plus, args=(4,)) == 7
            assert rpc.rpc_sync("worker1", math.sqrt, args=(4.0,)) == 2.0
            assert rpc.remote("worker1", Thing(3).plus, args=(4,)).to_here() == 7
            assert rpc.rpc_sync("worker1", apply, args=(os.path.join, "a", "b")) == "a/b"

    run_workers(2, check, pickle=True)


def test_pickle_is_refused_unless_all_ranks_ask_for_it():
    def check(rank):
        rpc.shutdown()
        with pytest.raises(RuntimeError, match=r"pickle=\.\.\.\) differs"):
            rpc.init_rpc(
                worker(rank),
                rank=rank,
                world_size=2,
                rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=PLACE),
                pickle=rank == 0,
            )

    run_workers(2, check)


def test_names_of_workers_are_checked():
    for wrong, why in (("", "non-empty"), ("a*", "must match"), ("a" * 128, "shorter than 128")):
        with pytest.raises(RuntimeError, match=why):
            rpc.WorkerInfo(wrong, 0)
    info = session.WorkerInfo("a-b_c:1", 3)
    assert {info: 1}[rpc.WorkerInfo(name="a-b_c:1", id=3)] == 1
    assert info != rpc.WorkerInfo("other", 3)
    assert info != 3
    with pytest.raises(AttributeError):
        info.name = "other"


def test_options_are_those_of_the_cpu():
    options = rpc.TensorPipeRpcBackendOptions()
    assert options.rpc_timeout == constants.DEFAULT_RPC_TIMEOUT_SEC
    assert options.init_method == "env://"
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"worker1": {"cpu": "cpu"}})
    assert options.device_maps == {"worker1": {torch.device("cpu"): torch.device("cpu")}}
    with pytest.raises(ValueError, match="not of cuda:0"):
        rpc.TensorPipeRpcBackendOptions(device_maps={"worker1": {"cuda:0": "cuda:1"}})
    with pytest.raises(ValueError, match="not of cuda"):
        rpc.TensorPipeRpcBackendOptions(devices=["cuda"])
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout="1")
    made = construct_rpc_backend_options(rpc.BackendType.TENSORPIPE, rpc_timeout=3)
    assert made.rpc_timeout == 3.0
    with pytest.raises(TypeError, match="member of BackendType"):
        rpc.init_rpc("a", backend="TENSORPIPE", rank=0, world_size=1)
    with pytest.raises(TypeError, match="instance of RpcBackendOptions"):
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options={})
    with pytest.raises(TypeError, match="Could not infer backend"):
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions())
