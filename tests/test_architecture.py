"""The layers of the design, as a table, and nothing imports upwards."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import rankwire

SOURCE = Path(rankwire.__file__).parent

LEAVES = {
    "errors", "texts", "clock", "deadline", "fork", "public_dir", "finalizers",
    "environment", "override", "runtime", "interrupts", "progress", "task_outcome",
}  # fmt: skip
TO_THE_WIRE = {"wire", "transports", "links"}
# What each layer may import of ours (its own modules apart).
MAY_IMPORT = {
    "error_base": set(),
    "errors": {"error_base", "texts"},
    "texts": set(),
    "fork": {"errors", "runtime"},
    "finalizers": {"errors", "clock", "runtime", "interrupts"},
    "clock": {"runtime"},
    "public_dir": set(),
    "override": set(),
    "runtime": set(),
    "interrupts": set(),
    "deadline": {"errors", "clock", "runtime"},
    "task_outcome": set(),
    "progress": {"clock", "deadline"},
    "environment": {"errors"},
    "codec": {"errors", "texts", "public_dir", "override"},
    "wire": {"errors", "texts", "codec", "override", "interrupts"},
    "observe": {*LEAVES, "wire"},
    "transports": {*LEAVES, "wire"},
    "links": {*LEAVES, "wire", "transports"},
    "rendezvous": {*LEAVES, *TO_THE_WIRE},
    "mesh": {*LEAVES, *TO_THE_WIRE, "observe", "rendezvous"},
    "backends": {*LEAVES, *TO_THE_WIRE, "codec", "observe", "rendezvous", "mesh"},
    "rpc": {*LEAVES, "codec", "wire", "links", "observe", "mesh", "backends"},
    "services": {*LEAVES, "codec", "backends", "rpc"},
    "collectives": {*LEAVES, "codec", "wire", "observe", "mesh", "backends"},
    "device_mesh": {"errors", "backends", "override"},
    "testing": {
        *LEAVES, "codec", "wire", "observe", "rendezvous", "mesh", "backends", "rpc",
        "services", "collectives", "launch",
    },
    "launch": {*LEAVES, *TO_THE_WIRE, "codec", "observe", "backends", "rendezvous"},
    "cli": {"errors", "launch"},
    "torch": {
        *LEAVES, "codec", "observe", "rendezvous", "mesh", "backends", "rpc", "collectives",
        "__init__",
    },
    "__main__": {"cli"},
    "__init__": {
        "errors", "codec", "observe", "transports", "backends", "rpc", "services", "collectives",
        "device_mesh", "launch", "task_outcome",
    },
}  # fmt: skip
BELOW_HANDLES = {"wire", "transports", "links"}
OF_LENT_MEMORY = {
    "rankwire.wire.loans", "rankwire.links.lender", "rankwire.links.borrower",
    "rankwire.links.memory",
}  # fmt: skip
NAMES_OF_LENT_MEMORY = {"Borrowed", "Lent", "Loan", "Placed", "Queued", "lend"}
BACKENDS = {"tcp", "simulated", "sub"}  # these do not know each other, and only this one makes one
MAKES_A_BACKEND = "connect"
BACKEND_INTERFACE = {
    "arguments",
    "base",
    "calls",
    "payloads",
}  # all that the layers above know of backends
PURE = {"texts", "codec", "wire"}
ABOVE_LINKS = {"rendezvous", "mesh", "backends", "rpc", "collectives", "device_mesh"}
IMPURE_MODULES = {
    "socket", "ssl", "select", "selectors", "threading", "asyncio", "time", "os", "subprocess",
    "logging", "multiprocessing", "signal", "pathlib", "tempfile", "io", "ctypes", "mmap", "fcntl",
}  # fmt: skip
# Types of ctypes are buffers that a user may send, and paths are values; nothing is called there.
TYPES_ONLY = {("arrays.py", "ctypes"), ("scalars.py", "pathlib")}
# Functions on their way from a program to processes that it has started itself, over its own pipe.
UNPICKLES = {SOURCE / "codec" / "codec.py", SOURCE / "launch" / "rank_program.py"}
# What only ``runtime`` imports, and what it alone takes from modules that others use too.
BEHIND_THE_DOOR = {
    "threading", "_thread", "socket", "select", "selectors", "secrets", "random", "queue",
}  # fmt: skip
BEHIND_THE_DOOR_OF = {
    ("os", "getpid"), ("os", "sched_yield"), ("os", "eventfd"), ("os", "eventfd_read"),
    ("os", "eventfd_write"), ("fcntl", "ioctl"),
}  # fmt: skip
# What carries bytes, and what one waits with for them, as far as the layers above must not.
IO_MODULES = {"ssl", "fcntl", "mmap", "ctypes"}
IO_NAMES = {
    ("os", "pipe"), ("os", "read"), ("os", "write"), ("os", "close"),
    ("runtime", "socketpair"), ("runtime", "create_server"), ("runtime", "getaddrinfo"),
    ("runtime", "poll"), ("runtime", "epoll"), ("runtime", "DefaultSelector"),
    ("runtime", "PollSelector"), ("runtime", "eventfd"),
}  # fmt: skip
# Who may use these, and why a simulation can run them: none of them waits for the system there.
USES_ASYNCIO = {
    "runtime": "makes the loops: a simulation makes others",
    "collectives": "a Work can be awaited, by the program's own loop",
    "rpc": "an RpcFuture can be awaited; coroutines are served in a loop that runtime makes",
    "services": "a chunk of coroutines awaits the futures that they return, in that loop",
    "testing": "checks serve coroutines, as a program does",
}
USES_FUTURES = {
    "collectives": "a Work is a Future, with a condition of runtime, and waits by its clock",
    "rpc": "so is an RpcFuture; a function may return a Future, and only its callback is used",
    "launch": "LocalWorld.on(rank).start returns one; real processes and threads, no world",
    "services": "relays and queues answer by one; an executor's thread waits by the clock",
    "torch": "torch's futures and remote references; torch runs in real time",
    "testing": "checks call what a program does",
}
# Sets of what has no order of its own, and why that is in order. An object's place in a set depends
# on its address, a text's on the seed of the process: a simulation would not repeat itself.
SETS_OF_OBJECTS = {
    "type": "asked only whether it has a type",
    "Any": "sets of the user; marks of what was visited",
    "Key": "pairs of numbers",
    "_Key": "pairs of numbers",
    "Link": "pairs of numbers",
    "tuple[int, int]": "pairs of numbers",
    "tuple[str, int]": "asked only whether it has a line",
    "tuple[Key, int, tuple[Key, ...]]": "compared as a whole",
}
# Runs as a script, with nothing but the standard library.
WITHOUT_THE_PACKAGE = SOURCE / "launch" / "reaper.py"
# What a rank asks its launcher and its resolver, before there is a world.
BEFORE_A_WORLD = {SOURCE / "rendezvous" / name for name in ("secret.py", "reachability.py")}
# What runs code, or makes objects of any class, out of bytes.
PICKLE_LIKE = {
    "pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "yaml",
}  # fmt: skip
OPTIONAL = {"torch", "mpi4py", "ray", "rich", "typer", "pytest", "cryptography", "ssl"}


def modules():
    return sorted(SOURCE.rglob("*.py"))


def imports(path):
    """Yield (module, is_at_import_time) for every import in a file, TYPE_CHECKING blocks apart."""
    tree = ast.parse(path.read_text())
    skipped = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    top_level = {node for statement in tree.body for node in _outside_functions(statement)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in top_level
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, node in top_level
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node in top_level


def _outside_functions(node):
    yield node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        for child in ast.iter_child_nodes(node):
            yield from _outside_functions(child)


def layer_of(path):
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def test_imports_go_down_only():
    for path, (module, _) in all_imports():
        layer = layer_of(path)
        if module.startswith("rankwire."):
            target = module.split(".")[1]
            if (SOURCE / target).is_dir() or (SOURCE / f"{target}.py").exists():
                assert target == layer or target in MAY_IMPORT[layer], f"{path} imports {module}"


def test_backends_do_not_know_each_other():
    for path, (module, _) in all_imports():
        if layer_of(path) != "backends" or path.stem == MAKES_A_BACKEND:
            continue
        own, parts = path.stem.split("_")[0], module.split(".")
        if parts[:2] == ["rankwire", "backends"] and len(parts) > 2:
            other = parts[2].split("_")[0]
            assert other == own or other not in BACKENDS, f"{path} imports {module}"


@functools.cache
def all_imports():
    """Each module with each of its imports."""
    return [(path, found) for path in modules() for found in imports(path)]


def test_calls_and_collectives_know_no_concrete_backend():
    for path in modules():
        if layer_of(path) in ("rpc", "collectives"):
            for module, _ in imports(path):
                parts = module.split(".")
                if parts[:2] == ["rankwire", "backends"] and len(parts) > 2:
                    assert parts[2] in BACKEND_INTERFACE, f"{path} imports {module}"


def test_codec_and_wire_are_pure():
    for path in modules():
        if layer_of(path) in PURE:
            for module, _ in imports(path):
                root = module.split(".")[0]
                if (path.name, root) not in TYPES_ONLY:
                    assert root not in IMPURE_MODULES, f"{path} imports {module}"


def test_lent_memory_ends_in_links():
    """Above there are messages, buffers and handles, however a message travels."""
    for path in modules():
        if layer_of(path) in BELOW_HANDLES:
            continue
        for module, _ in imports(path):
            assert module not in OF_LENT_MEMORY, f"{path} imports {module}"
            assert module.split(".")[-1] not in NAMES_OF_LENT_MEMORY, f"{path} imports {module}"


def test_only_links_touch_sockets_and_wait_for_them():
    for path in modules():
        if layer_of(path) not in ABOVE_LINKS or path in BEFORE_A_WORLD:
            continue
        for module, _ in imports(path):
            assert module.split(".")[0] not in IO_MODULES, f"{path} imports {module}"
        for found, line in dotted_names(path):
            assert found not in IO_NAMES, f"{path}:{line}: {'.'.join(found)}"


def dotted_names(path):
    """Yield (module or variable, attribute) for each ``a.b`` of a file, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield (node.value.id, node.attr), node.lineno


def test_there_is_one_door_to_the_machine():
    door = SOURCE / "runtime.py"
    for path in modules():
        if path in (door, WITHOUT_THE_PACKAGE):
            continue
        for module, _ in imports(path):
            assert module.split(".")[0] not in BEHIND_THE_DOOR, f"{path} imports {module}"
            assert not module.startswith("rankwire.runtime."), f"{path}: {module} stays"
        for found, line in dotted_names(path):
            assert found not in BEHIND_THE_DOOR_OF, f"{path}:{line}: {'.'.join(found)}"


@pytest.mark.parametrize(
    ("module", "users"), [("asyncio", USES_ASYNCIO), ("concurrent", USES_FUTURES)]
)
def test_asyncio_and_futures_are_used_where_a_simulation_can_run_them(module, users):
    found = {layer_of(path) for path, (name, _) in all_imports() if name.split(".")[0] == module}
    assert found == set(users)


def test_sets_hold_what_has_the_same_order_in_every_run():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and name_of(node.value) in SETS:
                element = ast.unparse(node.slice)
                known = {"int", "str", "int | None", *SETS_OF_OBJECTS}
                assert element in known, f"{path}:{node.lineno}: use a dict or a list"


SETS = {"set", "frozenset", "WeakSet"}


def test_pickle_is_only_behind_its_option():
    for path in modules():
        for module, is_at_import_time in imports(path):
            if module.split(".")[0] in PICKLE_LIKE:
                assert path in UNPICKLES, f"{path} imports {module}"
                is_for_all = is_at_import_time and layer_of(path) == "codec"
                assert not is_for_all, f"{path} loads {module} for everyone"


def test_importing_rankwire_loads_nothing_optional_and_no_launcher():
    code = "import rankwire, sys; rankwire.connect; print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    loaded = set(printed.split())
    assert not loaded & OPTIONAL
    assert not {name for name in loaded if name.startswith(("rankwire.launch", "rankwire.cli"))}


# Who looks at the time without a clock, and why.
OWN_LOOKS = {
    "clock.py": "it is the clock",
    "launch/reaper.py": "runs as a script with nothing but the standard library",
    "launch/certificates.py": "certificates have dates of the calendar",
}
# Who has the operating system wait for descriptors. Simulated worlds have none of these.
WAITS_OF_THE_SYSTEM = {
    "runtime.py": "it is the door",
    "transports/byte_stream.py": "poll of a descriptor",
    "transports/sockets.py": "names the events of that poll",
    "links/dialer.py": "names the events of that poll",
    "transports/tls.py": "names the events of that poll",
    "transports/poller.py": "epoll and poll; memory_stream has the twins for simulated worlds",
    "links/acceptor.py": "a selector of listeners and control connections",
    "transports/wakeup.py": "names the events of that selector, and of a launcher's",
    "rendezvous/secret.py": "names the events of a launcher's selector",
    **dict.fromkeys(
        (
            "launch/nodes.py",
            "launch/output.py",
            "launch/run.py",
        ),
        "a launcher is in no world",
    ),
}
NAMES_OF_POLLS = {
    ("runtime", name)
    for name in (
        *("poll", "epoll", "POLLIN", "POLLOUT", "EPOLLIN", "EPOLLONESHOT", "DefaultSelector"),
        *("PollSelector", "BaseSelector", "EVENT_READ", "EVENT_WRITE"),
    )
}
# Whose calls look like waits without a clock, and why they are in order.
OWN_WAITS = {
    "clock.py": "it is the clock",
    "launch/reaper.py": "runs as a script with nothing but the standard library",
    "rendezvous/secret.py": "a process asks its launcher over a socket, before there is a world",
    "testing/conformance/call_checks.py": "coroutines of a user sleep as asyncio does",
    "testing/conformance/nested_call_checks.py": "coroutines of a user sleep as asyncio does",
    "testing/conformance/group_checks.py": "a Work waits by its own clock",
    "torch/torch_rendezvous.py": "torch's stores wait by the system clock, before there is a world",
    "torch/group_operations.py": "a Work waits by its own clock",
    "testing/conformance/message_checks.py": "a handle waits by its own clock",
    "testing/conformance/stream_checks.py": "checks wait for generators to end, as a program does",
    "testing/conformance/role_checks.py": "a backend waits for a rank by its own clock",
}
# What has a ``wait`` of its own: by a deadline, and so the clock, or for bytes of a transport.
WAITS_BY_DEADLINE = {
    "reply", "offer", "sent", "lent", "_inbox", "inbox", "_stop_signal", "self", "stream",
    "_stream", "waiter",
}  # fmt: skip
TIMED_BY_ASYNCIO = {"wait_for", "timeout", "call_later", "call_at"}


def name_of(node):
    """Return the last name of an expression: ``_clock`` of ``self._mesh._clock``."""
    return getattr(node, "attr", getattr(node, "id", ""))


def is_clock(node):
    return name_of(node) in ("clock", "_clock", "REAL_TIME")


def waits_without_clock(tree):
    """Yield the calls of a file that wait, may be ended by time, and go through no clock."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function, given = call.func, [*call.args, *(keyword.value for keyword in call.keywords)]
        if not isinstance(function, ast.Attribute) or is_clock(function.value):
            continue
        receiver, verb = function.value, function.attr
        is_text = isinstance(receiver, ast.Constant | ast.Call) or name_of(receiver) == "path"
        match verb:
            case "acquire":
                is_timed = bool(given) and getattr(given[0], "value", None) is not False
            case "wait":
                is_timed = bool(given) and name_of(receiver) not in WAITS_BY_DEADLINE
            case "join":
                is_timed = bool(given) and not is_text
            case "settimeout" | "wait_for":
                is_timed = True
            case "sleep":
                is_timed = getattr(given[0], "value", None) != 0  # asyncio's, to let others run
            case _:
                is_timed = name_of(receiver) == "asyncio" and verb in TIMED_BY_ASYNCIO
        if is_timed:
            yield call


def looks_without_clock(path, tree):
    """Yield what a file does to learn the time by itself."""
    if "time" in {module.split(".")[0] for module, _ in imports(path)}:
        yield "imports time"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today"):
            if name_of(node.value) in ("datetime", "date"):
                yield f"asks for the date in line {node.lineno}"


def without_clock(path):
    """Return which of the three tables a file has to be in."""
    tree = ast.parse(path.read_text())
    imported = {module.split(".")[0] for module, _ in imports(path)}
    return {
        "looks": list(looks_without_clock(path, tree)),
        "descriptors": sorted(imported & {"select", "selectors"})
        + [f"line {line}" for found, line in dotted_names(path) if found in NAMES_OF_POLLS],
        "waits": [f"line {call.lineno}" for call in waits_without_clock(tree)],
    }


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_only_the_clock_looks_at_the_time_and_waits_for_it(path):
    name = str(path.relative_to(SOURCE))
    found = {what: bool(where) for what, where in without_clock(path).items()}
    assert found == {
        "looks": name in OWN_LOOKS,
        "descriptors": name in WAITS_OF_THE_SYSTEM,
        "waits": name in OWN_WAITS,
    }, without_clock(path)


TIMED = """
time.sleep(1)
lock.acquire(timeout=3)
lock.acquire(True, 3)
self._changed.wait(3)
event.wait(timeout=seconds)
condition.wait_for(predicate, 3)
thread.join(2)
thread.join(timeout=seconds)
sock.settimeout(3)
asyncio.sleep(1)
asyncio.wait_for(task, 3)
"""
NOT_TIMED = """
lock.acquire()
lock.acquire(False)
event.wait()
thread.join()
", ".join(names)
os.path.join(folder, name)
reply.wait(deadline)
clock.sleep(1)
clock.wait(event, 3)
self._clock.acquire(lock, True, 3)
REAL_TIME.join(thread, 3)
asyncio.sleep(0)
"""


def test_a_wait_without_a_clock_is_found_whatever_waits():
    assert len(list(waits_without_clock(ast.parse(TIMED)))) == len(TIMED.split("\n")) - 2
    assert not list(waits_without_clock(ast.parse(NOT_TIMED)))


def test_a_deadline_is_made_with_the_clock_of_its_world():
    """The real one is named only where the user enters, and outside of worlds."""
    entries = {"clock", "deadline", "simulated", "tcp", "connect"}
    of_no_world = {"finalizers"}
    for path in modules():
        if layer_of(path) in ("launch", "testing"):
            continue
        named = {module for module, _ in imports(path)}
        if "rankwire.clock.REAL_TIME" in named:
            assert path.stem in entries | of_no_world, (
                f"{path} does not take the clock that it is given"
            )


@pytest.mark.fault(55, "only monotonic time is used anywhere")
def test_only_monotonic_time_is_used():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "time":
                assert getattr(node.value, "id", "") != "time", f"{path}:{node.lineno}"
