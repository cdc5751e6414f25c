"""connect(): what a launcher left, read once, remembered, and explained when it is not there."""

import os
import socket

import pytest

from rankwire.errors import ConfigurationError, RendezvousError
from rankwire.launch import environment
from rankwire.launch.environment import connect
from rankwire.links.protection import Tls

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
    monkeypatch.setattr(environment, "_memory", environment._Memory())
    calls = []
    monkeypatch.setattr(environment, "TcpBackend", lambda **arguments: calls.append(arguments))
    return calls


@pytest.fixture
def launched(told, monkeypatch):
    """The same in a process that was started by `rankwire run`; also returns the secret's pipe."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    reading, writing = os.pipe()
    os.write(writing, b"s" * 32)
    os.close(writing)
    monkeypatch.setenv("RANKWIRE_SECRET_FD", str(reading))
    pipe = os.fstat(reading)
    yield told, reading
    if is_open(reading) and os.path.samestat(os.fstat(reading), pipe):
        os.close(reading)  # nobody got as far as to read it


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
            "listener": None,
            "has_coordinator": False,
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
    place = environment.Place(0, 1, "x:1", secret=b"hidden")
    assert "hidden" not in repr(place)


def test_rank_0_takes_the_listener_once(launched, monkeypatch):
    told, _ = launched
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd = os.dup(listener.fileno())
        os.set_inheritable(fd, True)
        monkeypatch.setenv("RANKWIRE_LISTEN_FD", str(fd))
        connect()
        taken = told[0]["listener"]
        assert taken.getsockname() == listener.getsockname()
        assert not os.get_inheritable(fd)
        taken.close()
    connect()
    assert told[1]["listener"] is None


@pytest.mark.parametrize("options", [{"address": "127.0.0.1:9"}, {"listener": None}])
def test_the_listener_is_closed_when_it_is_not_wanted(launched, monkeypatch, options):
    told, _ = launched
    fd = socket.create_server(("127.0.0.1", 0)).detach()
    monkeypatch.setenv("RANKWIRE_LISTEN_FD", str(fd))
    connect(**options)
    assert told[0]["listener"] is None
    assert not is_open(fd)


def test_the_listener_is_closed_at_other_ranks_and_after_a_failure(launched, monkeypatch):
    for rank in ("1", "0"):
        fd = socket.create_server(("127.0.0.1", 0)).detach()
        monkeypatch.setenv("RANKWIRE_LISTEN_FD", str(fd))
        monkeypatch.setenv("RANKWIRE_RANK", rank)

        def fail(**arguments):
            raise ConfigurationError("no")

        monkeypatch.setattr(environment, "TcpBackend", fail)
        with pytest.raises(ConfigurationError, match="no"):
            connect()
        assert not is_open(fd)


def test_a_first_refusal_is_final_and_so_are_missing_ranks(launched, monkeypatch):
    errors = [RendezvousError("refused"), None, RendezvousError("late", missing=[1])]

    def join(**arguments):
        error = errors.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(environment, "TcpBackend", join)
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

    monkeypatch.setattr(environment, "TcpBackend", fail)
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


@pytest.mark.parametrize(
    "name", ["RANKWIRE_RANK", "RANKWIRE_WORLD_SIZE", "RANKWIRE_SECRET_FD", "RANKWIRE_LISTEN_FD"]
)
def test_what_is_not_a_number_is_named(launched, monkeypatch, name):
    monkeypatch.setenv(name, "one")
    with pytest.raises(ConfigurationError, match=f"{name} is 'one'"):
        connect()


def test_a_descriptor_that_was_not_inherited(launched, monkeypatch, tmp_path):
    with (tmp_path / "other").open("wb") as other:
        monkeypatch.setenv("RANKWIRE_SECRET_FD", str(other.fileno()))
        with pytest.raises(ConfigurationError, match="not the pipe"):
            connect()
        assert is_open(other.fileno())
        monkeypatch.setenv("RANKWIRE_LISTEN_FD", str(other.fileno()))
        with pytest.raises(ConfigurationError, match="RANKWIRE_LISTEN_FD"):
            connect()
    monkeypatch.delenv("RANKWIRE_LISTEN_FD", raising=False)
    monkeypatch.setenv("RANKWIRE_SECRET_FD", "999")
    with pytest.raises(ConfigurationError, match="Bad file descriptor"):
        connect()


def test_a_pipe_that_someone_else_has_read_or_still_writes(launched, monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setenv("RANKWIRE_SECRET_FD", str(reading))
    with pytest.raises(ConfigurationError, match="cannot be read"):  # and does not block
        connect()
    os.close(writing)
    monkeypatch.setenv("RANKWIRE_SECRET_FD", str(reading))
    with pytest.raises(ConfigurationError, match="empty"):
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


@pytest.mark.parametrize("missing", ["CERT", "KEY", "CA"])
def test_a_file_for_tls_that_is_missing_is_named(launched, monkeypatch, missing):
    for name in {"CERT", "KEY", "CA"} - {missing}:
        monkeypatch.setenv(f"RANKWIRE_TLS_{name}", f"/files/{name}")
    with pytest.raises(ConfigurationError, match=f"RANKWIRE_TLS_{missing} is not set"):
        connect()


def test_one_world_of_processes_after_another(run):
    done = run(
        """
from rankwire.launch.environment import connect
from rankwire.links.protection import Tls
for _ in range(3):
    with connect() as backend:
        backend.barrier()
        assert backend.rank == rank
        if rank == 0:
            time.sleep(0.1)  # the others are back before this world is closed
print(backend.world_size)
""",
        "--no-prefix",
        ranks=3,
    )
    assert (done.returncode, done.stdout) == (0, "3\n" * 3), done.stderr
