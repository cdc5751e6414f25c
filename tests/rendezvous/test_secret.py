"""The job's secret: where it is looked for, what is refused, and that it stays one."""

import os
import socket
import stat
import time
import warnings
from types import SimpleNamespace

import pytest

from rankwire.errors import ConfigurationError
from rankwire.rendezvous import runtime_dir
from rankwire.rendezvous import secret as secret_module
from rankwire.rendezvous.runtime_dir import runtime_folder
from rankwire.rendezvous.secret import MIN_SECRET_NBYTES, AgreedSecret, given_secret
from worlds import SECRET, bound_socket, runtime_folder_of_its_own

IN_FILE = b"the secret that is in the file"
IN_ENVIRONMENT = "the secret that is in the environment"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path_factory):
    tmp_path_factory.getbasetemp()  # pytest looks up the user for it, which is replaced below
    monkeypatch.delenv("RANKWIRE_SECRET", raising=False)
    monkeypatch.delenv("RANKWIRE_SECRET_FILE", raising=False)
    monkeypatch.setattr(secret_module, "_from_environment", None)
    with runtime_folder_of_its_own() as path:
        # The folders that all jobs of this user share may have a job on the same port.
        monkeypatch.setattr(runtime_dir, "_SHARED", path.parent)
        nowhere = SimpleNamespace(pw_dir=str(path / "no home"))
        monkeypatch.setattr(runtime_dir.pwd, "getpwuid", lambda _: nowhere)
        yield path


@pytest.fixture
def secret_file(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_bytes(IN_FILE + b"\n")
    path.chmod(0o600)
    monkeypatch.setenv("RANKWIRE_SECRET_FILE", str(path))
    return path


def find(secret=None, *, loopback=False, insecure=False):
    return given_secret(secret, loopback=loopback, insecure=insecure)


# -- the order in which it is looked for


def test_text_and_bytes_are_the_same_secret():
    assert find("0123456789abcdef") == find(b"0123456789abcdef") == b"0123456789abcdef"
    assert find("ü" * 8) == ("ü" * 8).encode()
    assert find(bytearray(SECRET)) == SECRET


def test_the_argument_wins_over_the_file_and_the_file_over_the_environment(
    secret_file, monkeypatch
):
    monkeypatch.setenv("RANKWIRE_SECRET", IN_ENVIRONMENT)
    assert find(SECRET) == SECRET
    assert find() == IN_FILE
    monkeypatch.delenv("RANKWIRE_SECRET_FILE")
    assert find() == IN_ENVIRONMENT.encode()


def test_on_loopback_none_is_needed():
    assert find(loopback=True) is None


def test_a_secret_is_used_on_loopback_too():
    assert find(SECRET, loopback=True) == SECRET


def test_off_loopback_a_missing_secret_is_an_error_that_says_what_to_do():
    with pytest.raises(ConfigurationError) as caught:
        find()
    for way_out in ("secret=", "RANKWIRE_SECRET_FILE", 'security="insecure"'):
        assert way_out in str(caught.value)


def test_running_without_a_secret_must_be_spelled_out_and_warns():
    with pytest.warns(UserWarning, match="insecure"):
        first = find(insecure=True)
    with pytest.warns(UserWarning, match="insecure"):
        assert find(insecure=True) == first, "the ranks must still find each other"


def test_a_secret_is_used_even_where_none_is_needed():
    with pytest.warns(UserWarning, match="insecure"):
        assert find(SECRET, insecure=True) == SECRET


def test_one_warning_is_enough():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        find(insecure=True)
    assert len(caught) == 1


# -- what is no secret


@pytest.mark.parametrize("length", [0, 1, MIN_SECRET_NBYTES - 1])
@pytest.mark.parametrize("loopback", [False, True])
@pytest.mark.parametrize("insecure", [False, True])
def test_a_short_secret_is_refused_everywhere(length, loopback, insecure):
    with pytest.raises(ConfigurationError, match=f"{length} bytes"):
        find(b"x" * length, loopback=loopback, insecure=insecure)


def test_the_shortest_secret_is_taken():
    assert MIN_SECRET_NBYTES == 16
    assert find(b"x" * MIN_SECRET_NBYTES) == b"x" * MIN_SECRET_NBYTES


def test_the_text_of_a_refusal_does_not_show_the_secret():
    with pytest.raises(ConfigurationError) as caught:
        find("almost-secret")
    assert "almost-secret" not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize("value", [32, True])
def test_a_secret_that_is_neither_text_nor_bytes_is_refused(value):
    """``bytes(32)`` is 32 zeros, which everybody can guess."""
    with pytest.raises((ConfigurationError, TypeError)):
        find(value)


# -- the file


@pytest.mark.parametrize("mode", [0o640, 0o601])
def test_a_file_that_others_can_reach_is_refused(secret_file, mode):
    secret_file.chmod(mode)
    with pytest.raises(ConfigurationError, match="0600") as caught:
        find(loopback=True)
    assert str(secret_file) in str(caught.value)
    assert IN_FILE.decode() not in str(caught.value)


def test_a_file_that_is_not_there_is_an_error_that_names_it(secret_file):
    """Falling back to another secret would hide a mistake."""
    secret_file.unlink()
    with pytest.raises(ConfigurationError) as caught:
        find(loopback=True, insecure=True)
    assert str(secret_file) in str(caught.value)
    assert "No such file" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"short\n"])
def test_a_file_without_a_whole_secret_is_refused(secret_file, content):
    """An empty file is a mistake too; it must not mean "no secret"."""
    secret_file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"{len(content.strip())} bytes"):
        find(loopback=True)


# -- the environment


def test_the_variable_is_removed_so_that_children_do_not_inherit_it(monkeypatch):
    monkeypatch.setenv("RANKWIRE_SECRET", IN_ENVIRONMENT)
    find()
    assert "RANKWIRE_SECRET" not in os.environ


def test_the_variable_serves_every_backend_of_the_process(monkeypatch):
    monkeypatch.setenv("RANKWIRE_SECRET", IN_ENVIRONMENT)
    assert find() == find() == IN_ENVIRONMENT.encode()


@pytest.mark.parametrize("value", ["", "short"])
def test_a_variable_without_a_whole_secret_is_refused(monkeypatch, value):
    monkeypatch.setenv("RANKWIRE_SECRET", value)
    with pytest.raises(ConfigurationError, match=f"{len(value)} bytes"):
        find(loopback=True)


# -- the agreed secret


def mode_of(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_agreed_secret_is_in_a_file_that_only_the_user_can_read(folder):
    before = os.umask(0)
    try:
        AgreedSecret(29500).publish()
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert mode_of(path) == 0o600
    assert mode_of(folder) == 0o700


def test_without_a_rank_0_there_is_none():
    assert AgreedSecret(29500).read() is None


def test_every_job_has_its_own():
    one, other = AgreedSecret(29500).publish(), AgreedSecret(29501).publish()
    assert one != other
    assert AgreedSecret(29500).read() == one
    assert AgreedSecret(29501).read() == other


def test_a_later_job_on_the_port_replaces_it_and_keeps_the_file_closed(folder):
    stale = AgreedSecret(29500).publish()
    (path,) = folder.iterdir()
    path.chmod(0o644)
    fresh = AgreedSecret(29500).publish()
    assert fresh != stale
    assert AgreedSecret(29500).read() == fresh
    assert mode_of(path) == 0o600


def test_it_is_removed_with_its_job(folder):
    agreed = AgreedSecret(29500)
    agreed.remove(agreed.publish())
    assert list(folder.iterdir()) == []
    agreed.remove(b"removed already")


def test_the_end_of_an_earlier_job_does_not_remove_a_later_jobs_secret():
    earlier = AgreedSecret(29500)
    first = earlier.publish()
    second = AgreedSecret(29500).publish()
    earlier.remove(first)
    assert AgreedSecret(29500).read() == second


def test_a_folder_open_to_others_is_not_used(folder):
    AgreedSecret(29500).publish()
    folder.chmod(0o755)
    assert AgreedSecret(29500).read() is None


def test_ranks_find_each_other_when_the_way_was_cleared_between_their_choices(folder):
    """Another user holds the first folder while rank 0 looks, and lets it go for rank 1."""
    folder.touch()
    published = AgreedSecret(29500).publish()
    folder.unlink()
    assert AgreedSecret(29500).read() == published
    assert folder.is_dir()


def test_secrets_whose_rank_0_is_gone_are_swept_and_no_others(folder):
    ours = os.stat("/proc/self/ns/net").st_ino
    runtime_folder()
    ages = {"old": 100.0, "new": 1.0, "ancient": 100_000.0}
    with socket.create_server(("127.0.0.1", 0)) as living, bound_socket() as dead:
        taken, free = living.getsockname()[1], dead.getsockname()[1]
        kept = {
            f"secret-{ours}-{taken}": "ancient",
            f"secret-{ours}-{free}": "new",  # its rank 0 may be about to listen
            f"secret-{ours + 1}-{free}": "old",  # of another container: its ports are not seen
            "secret": "ancient",
            "other": "ancient",
        }
        swept = {
            f"secret-{ours}-2": "old",
            f"secret-{ours}-{taken}.4711": "old",  # a draft
            f"secret-{ours + 1}-{taken}": "ancient",
        }
        for name, age in {**kept, **swept}.items():
            path = folder / name
            path.touch(mode=0o600)
            os.utime(path, (time.time() - ages[age],) * 2)
        AgreedSecret(1).publish()
        left = {path.name for path in folder.iterdir()}
    assert left == set(kept) | {f"secret-{ours}-1"}


def test_it_is_not_in_a_repr():
    agreed = AgreedSecret(29500)
    secret = agreed.publish()
    assert repr(secret)[2:-1] not in repr(agreed)
    assert secret.hex() not in repr(agreed)
