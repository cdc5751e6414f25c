"""Which host this is, and the folder for socket files and agreed secrets."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankwire import runtime
from rankwire.errors import ConfigurationError
from rankwire.rendezvous import runtime_dir
from worlds import runtime_folder_of_its_own

ASK_HOST_ID = "from rankwire.rendezvous.runtime_dir import host_id; print(host_id())"


@pytest.fixture(autouse=True)
def folder():
    """Where the runtime folder will be; it does not exist yet."""
    with runtime_folder_of_its_own() as path:
        yield path


def dead_pid() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


# -- the host


def test_two_processes_of_a_host_have_the_same_host_id():
    other = subprocess.run(
        [sys.executable, "-c", ASK_HOST_ID], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == runtime_dir.host_id() == runtime_dir.host_id()


def test_another_network_namespace_is_another_host():
    """A socket file may be seen there, but an address of this namespace reaches nobody."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    command = ["unshare", "--net", sys.executable, "-c", ASK_HOST_ID]
    other = subprocess.run(command, capture_output=True, text=True, check=False)
    if other.returncode:
        pytest.skip("this process may not make namespaces")
    assert other.stdout.strip() != runtime_dir.host_id()


def test_without_proc_the_host_is_named_after_the_node(monkeypatch):
    def refuse(self):
        raise FileNotFoundError(str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert os.uname().nodename in runtime_dir.host_id()


# -- the runtime folder


def test_the_folder_is_closed_to_others_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        assert runtime_dir.runtime_folder() == folder
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


class Places:
    """Where the folders are that come after the one asked for; none is there yet."""

    def __init__(self, base: Path) -> None:
        self.shared = base / "tmp"
        self.home = base / "home"
        self.shared.mkdir(mode=0o700)
        self.shared.chmod(0o1777)
        self.home.mkdir(mode=0o755)
        self.of_user = self.shared / f"rankwire-{os.geteuid()}"


@pytest.fixture
def places(folder, monkeypatch):
    made = Places(folder.parent)  # a short path: pytest's own would be too long for socket files
    monkeypatch.setattr(runtime_dir, "_SHARED", made.shared)
    monkeypatch.setattr(
        runtime_dir.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=str(made.home))
    )
    monkeypatch.setattr(runtime_dir, "_said", set())
    return made


def test_without_a_runtime_directory_the_folder_is_a_shared_one_named_after_the_user(
    places, monkeypatch, caplog
):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime_dir.runtime_folder() == places.of_user
    assert stat.S_IMODE(places.of_user.stat().st_mode) == 0o700
    assert caplog.messages == []


def test_a_runtime_directory_that_is_not_there_is_passed_over_and_that_is_said_once(
    places, folder, monkeypatch, caplog
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "nowhere"))
    assert runtime_dir.runtime_folder() == runtime_dir.runtime_folder() == places.of_user
    (message,) = caplog.messages
    assert message == (
        f"XDG_RUNTIME_DIR={folder / 'nowhere'}: No such file or directory; {places.of_user} is"
        " used instead. Set RANKWIRE_RUNTIME_DIR to a folder of yours with mode 0700"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_runtime_directory_of_another_user_is_passed_over(places, folder):
    os.chown(folder.parent, 12345, 12345)
    chosen, trouble = runtime_dir.find_runtime_folder()
    assert chosen == places.of_user
    assert trouble == f"XDG_RUNTIME_DIR={folder.parent}: it belongs to another user"
    assert not folder.exists()


def test_the_variable_of_ours_comes_first(places, folder, monkeypatch):
    monkeypatch.setenv("RANKWIRE_RUNTIME_DIR", str(folder.with_name("mine")))
    assert runtime_dir.runtime_folder() == folder.with_name("mine")


def _open(path):
    path.mkdir()
    path.chmod(0o755)


def _of_another(path):
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


def _link(path):
    elsewhere = path.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    path.symlink_to(elsewhere)


BLOCKS = [
    pytest.param(_open, id="open to others"),
    pytest.param(
        _of_another,
        id="of another user",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away"),
    ),
    pytest.param(_link, id="a link"),  # whoever can make the link decides what is in the folder
    pytest.param(lambda path: path.symlink_to("/nowhere"), id="a link to nothing"),
    pytest.param(lambda path: path.touch(mode=0o600), id="a file"),
]


@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_not_this_users_alone_is_passed_over(places, folder, block):
    block(folder)
    assert runtime_dir.runtime_folder() == places.of_user


@pytest.mark.parametrize("block", BLOCKS)
def test_who_takes_the_shared_folder_first_blocks_nobody(places, monkeypatch, block):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    block(places.of_user)
    taken = runtime_dir.runtime_folder()
    assert taken.parent == places.home / ".rankwire"
    assert stat.S_IMODE(taken.parent.stat().st_mode) == stat.S_IMODE(taken.stat().st_mode) == 0o700
    assert runtime_dir.runtime_folder() == taken


def test_a_folder_that_others_could_replace_is_passed_over(places, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    places.shared.chmod(0o777)  # not sticky: anyone can rename what is in it
    assert runtime_dir.runtime_folder().parent.parent == places.home


def test_a_path_too_long_for_socket_files_is_passed_over(places, folder, monkeypatch):
    long = folder.with_name("x" * 60)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert runtime_dir.runtime_folder() == places.of_user


def test_when_none_can_be_had_all_reasons_are_told_and_what_to_set(places, folder):
    folder.touch()
    places.of_user.touch()
    places.home.rmdir()
    with pytest.raises(ConfigurationError) as caught:
        runtime_dir.runtime_folder()
    for text in (folder, places.of_user, places.home, "Set RANKWIRE_RUNTIME_DIR to"):
        assert str(text) in str(caught.value)


# -- socket files


def test_socket_paths_are_unique_and_name_their_process(folder):
    paths = {runtime_dir.new_socket_path() for _ in range(100)}
    assert len(paths) == 100
    for path in paths:
        assert Path(path).parent == folder
        assert Path(path).name.startswith(f"{pid_namespace()}-{os.getpid()}-")
        assert path.endswith(".sock")


def test_socket_paths_fit_into_a_socket_address_with_the_usual_runtime_directory(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/4294967295")
    monkeypatch.setattr(
        runtime_dir, "runtime_folder", lambda: Path("/run/user/4294967295/rankwire")
    )
    monkeypatch.setattr(runtime, "getpid", lambda: 2**22)
    assert len(runtime_dir.new_socket_path()) < 108


def test_socket_files_of_dead_processes_are_swept_and_no_others(folder):
    ours, dead = pid_namespace(), dead_pid()
    runtime_dir.runtime_folder()
    kept = [
        f"{ours}-{os.getpid()}-aaaaaaaa.sock",
        f"{ours}-{os.getppid()}-aaaaaaaa.sock",
        f"{ours + 1}-{dead}-aaaaaaaa.sock",  # of another container: its processes are not seen
        f"{ours}-{dead}-aaaaaaaa.sock.txt",
        f"{ours}-dead-aaaaaaaa.sock",
        f"secret-{ours}-{dead}",
    ]
    swept = [f"{ours}-{dead}-aaaaaaaa.sock", f"{ours}-{dead}-bbbbbbbb.sock"]
    for name in kept + swept:
        (folder / name).touch()
    runtime_dir.sweep_socket_files()
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)


def test_a_file_that_another_sweep_removed_first_is_no_error(folder, monkeypatch):
    path = runtime_dir.runtime_folder() / f"{pid_namespace()}-{dead_pid()}-aaaaaaaa.sock"
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [path])
    runtime_dir.sweep_socket_files()


def test_a_socket_file_that_was_removed_is_told_from_one_that_is_there_or_cannot_be_seen():
    path = Path(runtime_dir.new_socket_path())
    path.touch()
    assert not runtime_dir.has_removed(str(path))
    path.unlink()
    assert runtime_dir.has_removed(str(path))
    assert not runtime_dir.has_removed(str(path.with_name(f"1{path.name}")))  # of another container
    assert not runtime_dir.has_removed("")


def test_only_socket_files_of_the_runtime_folder_are_removed_for_others(tmp_path):
    """The path is what another process said, and it may have said anything."""
    ours = Path(runtime_dir.new_socket_path())
    elsewhere = tmp_path / "some.sock"
    other = ours.with_suffix(".key")
    for file in (ours, elsewhere, other):
        file.touch()
        runtime_dir.remove_socket_file(str(file))
    assert [file.exists() for file in (ours, elsewhere, other)] == [False, True, True]
    runtime_dir.remove_socket_file(str(ours))
