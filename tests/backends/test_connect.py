"""connect(): what a launcher left, read once, remembered, and explained when it is not there."""

import contextlib
import inspect
import os
import selectors
import socket
import threading
from typing import get_type_hints

import pytest

from rankwire.backends import connect as connect_module
from rankwire.backends.connect import ConnectOptions, connect
from rankwire.backends.tcp import TcpBackend
from rankwire.clock import REAL_TIME
from rankwire.errors import ConfigurationError, RendezvousError
from rankwire.rendezvous.secret import SecretServer
from rankwire.transports.security import Tls

VARIABLES = {
    "RANKWIRE_RANK": "0",
    "RANKWIRE_WORLD_SIZE": "2",
    "RANKWIRE_ADDRESS": "127.0.0.1:5000",
    "RANKWIRE_JOB": "job",
}


@pytest.fixture
def told(monkeypatch):
    """What connect() passes to the backend, in a process of which nothing is known yet."""
    for name in list(os.environ):
        if name.startswith("RANKWIRE_"):
            monkeypatch.delenv(name)
    for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(connect_module, "_memory", connect_module._Memory())
    calls = []
    monkeypatch.setattr(connect_module, "TcpBackend", lambda **arguments: calls.append(arguments))
    return calls


@pytest.fixture
def launched(told, monkeypatch):
    """The same in a process that was started by `rankwire run`; also returns the socket to it."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    with launcher_of(os.getpid()) as fd:
        monkeypatch.setenv("RANKWIRE_SECRET_FD", str(fd))
        status = os.fstat(fd)
        yield told, fd
        if is_open(fd) and os.path.samestat(os.fstat(fd), status):
            os.close(fd)  # nobody got as far as to ask


@contextlib.contextmanager
def launcher_of(process):
    """Serve a process as its launcher does; yields the socket that it inherits."""
    handover = SecretServer(b"s" * 32)
    is_over = threading.Event()
    with selectors.PollSelector() as selector:
        handover.serve(selector, process)

        def serve():
            while not is_over.is_set():
                for key, _ in selector.select(0.02):
                    key.data()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield handover.theirs.detach()
        finally:
            is_over.set()
            thread.join()
            handover.close()


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_the_place_in_the_world(launched):
    told, reading = launched
    connect(timeout=3.0)
    assert told == [
        {
            "rank": 0,
            "world_size": 2,
            "address": "127.0.0.1:5000",
            "job": "job",
            "secret": b"s" * 32,
            "has_coordinator": False,
            "clock": REAL_TIME,
            "timeout": 3.0,
        }
    ]
    assert not is_open(reading)
    assert "RANKWIRE_SECRET_FD" not in os.environ


def test_the_secret_is_remembered(launched):
    told, _ = launched
    connect()
    connect()
    assert told[0] == told[1]


def test_options_win(launched):
    told, reading = launched
    connect(rank=1, secret=b"mine", job="other")
    assert (told[0]["rank"], told[0]["secret"], told[0]["job"]) == (1, b"mine", "other")
    assert not is_open(reading)


def test_the_secret_is_not_shown():
    place = connect_module.Assignment(0, 1, "x:1", secret=b"hidden")
    assert "hidden" not in repr(place)


def test_a_first_refusal_is_final_and_so_are_missing_ranks(launched, monkeypatch):
    errors = [RendezvousError("refused"), None, RendezvousError("late", missing=[1])]

    def join(**arguments):
        error = errors.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(connect_module, "TcpBackend", join)
    with pytest.raises(RendezvousError, match="refused"):
        connect()
    connect()
    with pytest.raises(RendezvousError, match="late"):
        connect()
    errors.extend([RendezvousError("refused")] * 9)
    with pytest.raises(RendezvousError, match="refused"):
        connect(join_timeout=0.2)
    assert len(errors) > 3


def test_a_coordinator_in_the_launcher(launched, monkeypatch):
    told, _ = launched
    monkeypatch.setenv("RANKWIRE_COORDINATOR", "launcher")
    connect()
    connect(address="127.0.0.1:9")
    connect(address="127.0.0.1:9", has_coordinator=True)
    assert [call["has_coordinator"] for call in told] == [True, False, True]


def test_it_is_said_which_launcher_was_found_and_what_to_try(told, monkeypatch, caplog):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def fail(**arguments):
        raise RendezvousError("late", missing=[1])

    monkeypatch.setattr(connect_module, "TcpBackend", fail)
    with caplog.at_level("INFO", logger="rankwire"), pytest.raises(RendezvousError) as caught:
        connect()
    assert "rank 0 of 2, started by RANK, WORLD_SIZE" in caplog.text
    assert "RANKWIRE_PORT" in caught.value.__notes__[0]


def test_the_secret_is_for_worlds_of_our_own_launcher(launched, monkeypatch):
    told, reading = launched
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in (variables | {"RANKWIRE_LAUNCHER": "env"}).items():
        monkeypatch.setenv(name, value)
    connect()
    assert told[0]["secret"] is None
    assert is_open(reading)


def test_by_hand(told, monkeypatch):
    for name, value in VARIABLES.items():
        if name != "RANKWIRE_JOB":
            monkeypatch.setenv(name, value)
    connect()
    assert told[0]["secret"] is None
    assert told[0]["job"] == "default"


def test_not_launched(told):
    with pytest.raises(ConfigurationError, match=r"rankwire run -n 4 script\.py") as caught:
        connect()
    for name in ("RANKWIRE_RANK", "RANKWIRE_WORLD_SIZE", "RANKWIRE_ADDRESS"):
        assert name in str(caught.value)


def test_what_is_missing_is_named(launched, monkeypatch):
    monkeypatch.delenv("RANKWIRE_ADDRESS")
    with pytest.raises(ConfigurationError, match="not RANKWIRE_ADDRESS"):
        connect()


@pytest.mark.parametrize("name", ["RANKWIRE_RANK", "RANKWIRE_WORLD_SIZE", "RANKWIRE_SECRET_FD"])
def test_what_is_not_a_number_is_named(launched, monkeypatch, name):
    monkeypatch.setenv(name, "one")
    with pytest.raises(ConfigurationError, match=f"{name} is 'one'"):
        connect()


def test_a_descriptor_that_was_not_inherited(launched, monkeypatch, tmp_path):
    with (tmp_path / "other").open("wb") as other:
        monkeypatch.setenv("RANKWIRE_SECRET_FD", str(other.fileno()))
        with pytest.raises(ConfigurationError, match="not a launcher's socket"):
            connect()
        assert is_open(other.fileno())
    monkeypatch.setenv("RANKWIRE_SECRET_FD", "999")
    with pytest.raises(ConfigurationError, match="Bad file descriptor"):
        connect()


def test_a_launcher_that_is_gone_or_started_another_process(launched, monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    monkeypatch.setenv("RANKWIRE_SECRET_FD", str(theirs.detach()))
    with pytest.raises(ConfigurationError, match="cannot be read from RANKWIRE_SECRET_FD"):
        connect()
    with launcher_of(os.getpid() + 1) as fd:
        monkeypatch.setenv("RANKWIRE_SECRET_FD", str(fd))
        with pytest.raises(ConfigurationError, match="only to the process that it started itself"):
            connect()


# -- protection


def test_protection_is_left_to_the_backend_if_nothing_is_said(launched):
    told, _ = launched
    connect()
    assert "security" not in told[0]
    assert "tls" not in told[0]


def test_the_environment_may_say_how_to_protect_and_options_win(launched, monkeypatch):
    told, _ = launched
    monkeypatch.setenv("RANKWIRE_SECURITY", "auth")
    connect()
    connect(security="local")
    assert [arguments["security"] for arguments in told] == ["auth", "local"]


def test_files_for_tls_come_from_the_environment(launched, monkeypatch):
    told, _ = launched
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.setenv(f"RANKWIRE_TLS_{name}", f"/files/{name}")
    connect()
    assert told[0]["tls"] == Tls(cert="/files/CERT", key="/files/KEY", ca="/files/CA")


def test_how_certificates_name_ranks_comes_from_the_environment_too(launched, monkeypatch):
    told, _ = launched
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.setenv(f"RANKWIRE_TLS_{name}", f"/files/{name}")
    monkeypatch.setenv("RANKWIRE_TLS_NAMES", "worker-{rank}")
    connect()
    assert told[0]["tls"].names == "worker-{rank}"


@pytest.mark.parametrize("missing", ["CERT", "KEY", "CA"])
def test_a_file_for_tls_that_is_missing_is_named(launched, monkeypatch, missing):
    for name in {"CERT", "KEY", "CA"} - {missing}:
        monkeypatch.setenv(f"RANKWIRE_TLS_{name}", f"/files/{name}")
    with pytest.raises(ConfigurationError, match=f"RANKWIRE_TLS_{missing} is not set"):
        connect()


@pytest.fixture
def folder(tmp_path):
    """A folder as `rankwire certificates` makes it, for two ranks; nothing here looks inside."""
    for name in ("ca.pem", "rank-0.pem", "rank-0.key", "rank-1.pem", "rank-1.key"):
        (tmp_path / name).touch()
    return tmp_path


def test_a_folder_for_tls_has_the_files_of_this_rank(launched, monkeypatch, folder):
    told, _ = launched
    monkeypatch.setenv("RANKWIRE_TLS_DIR", str(folder))
    connect()
    connect(rank=1)
    for rank in range(2):
        names = (f"rank-{rank}.pem", f"rank-{rank}.key", "ca.pem")
        assert told[rank]["tls"] == Tls(*(folder / name for name in names))


def test_a_folder_for_tls_without_the_files_of_this_rank(launched, monkeypatch, folder):
    told, _ = launched
    monkeypatch.setenv("RANKWIRE_TLS_DIR", str(folder))
    with pytest.raises(ConfigurationError, match=r"no rank-2\.pem and no rank-2\.key"):
        connect(rank=2)
    mine = Tls(cert="c", key="k", ca="a")
    connect(rank=2, tls=mine)
    assert [arguments["tls"] for arguments in told] == [mine]


def test_a_folder_and_files_for_tls_contradict_each_other(launched, monkeypatch, folder):
    monkeypatch.setenv("RANKWIRE_TLS_DIR", str(folder))
    monkeypatch.setenv("RANKWIRE_TLS_CA", "/files/CA")
    with pytest.raises(ConfigurationError, match="RANKWIRE_TLS_DIR and RANKWIRE_TLS_CA"):
        connect()


# -- where to listen


def test_the_environment_may_say_where_to_listen_and_options_win(launched, monkeypatch):
    told, _ = launched
    monkeypatch.setenv("RANKWIRE_RANK", "1")
    monkeypatch.setenv("RANKWIRE_LISTEN", "10.0.0.5:29600-29700")
    monkeypatch.setenv("RANKWIRE_ADVERTISE", "outside")
    connect()
    connect(listen="10.0.0.6", advertise=None)
    assert [(arguments["listen"], arguments["advertise"]) for arguments in told] == [
        ("10.0.0.5:29600-29700", "outside"),
        ("10.0.0.6", None),
    ]


def test_the_environment_may_say_how_much_memory_is_shared(launched, monkeypatch):
    told, _ = launched
    monkeypatch.setenv("RANKWIRE_SEGMENT", "65536")
    connect()
    connect(segment_nbytes=0)
    assert [arguments["segment_nbytes"] for arguments in told] == [65536, 0]
    monkeypatch.setenv("RANKWIRE_SEGMENT", "8 MiB")
    with pytest.raises(ConfigurationError, match="RANKWIRE_SEGMENT is '8 MiB', not an integer"):
        connect()


@pytest.mark.parametrize(
    ("listen", "host"), [("10.0.0.5:29600-29700", "10.0.0.5"), (":29600-29700", None), ("::", "::")]
)
def test_a_rank_0_that_coordinates_listens_at_the_port_where_it_is_looked_for(
    launched, monkeypatch, listen, host
):
    told, _ = launched
    monkeypatch.setenv("RANKWIRE_LISTEN", listen)
    connect()
    connect(has_coordinator=True)
    assert [arguments.get("listen") for arguments in told] == [host, listen]


def test_the_options_are_the_arguments_of_the_backend():
    arguments = inspect.signature(TcpBackend).parameters
    options = get_type_hints(ConnectOptions)
    assert options.keys() == arguments.keys()
    assert options == {name: get_type_hints(TcpBackend.__init__)[name] for name in arguments}


def test_an_unknown_option_is_refused_before_a_launcher_is_looked_for(told):
    with pytest.raises(TypeError, match="unexpected keyword argument 'timeot'"):
        connect(timeot=5)
    assert not told
