"""Log files in folders where others may have put something in the way."""

import os
import stat

import pytest

from rankwire.errors import ConfigurationError
from rankwire.launch.output_streams import LogFolder

OTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def write(path, data=b"output\n", rank=0):
    folder = LogFolder(path, pytest.fail)
    try:
        folder.open(rank).write(data)
    finally:
        folder.close()
    return (path / f"rank_{rank}.log").read_bytes()


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def refused(path, match):
    with pytest.raises(ConfigurationError, match=match):
        write(path)


def test_the_folder_is_made_and_an_old_log_is_replaced(tmp_path):
    path = tmp_path / "a" / "b"
    assert write(path, b"the first, which is longer\n") == b"the first, which is longer\n"
    assert write(path, b"the second\n") == b"the second\n"


@pytest.fixture
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_umask")
def test_only_their_user_can_read_logs_and_a_folder_that_was_made_for_them(tmp_path):
    path = tmp_path / "a" / "b"
    write(path)
    assert mode_of(path) == 0o700
    assert mode_of(path / "rank_0.log") == 0o600


@pytest.mark.usefixtures("usual_umask")
def test_a_log_that_others_can_read_is_replaced_by_a_private_one(tmp_path):
    """They may have it open, so a change of its mode would not do. The folder is the user's."""
    (tmp_path / "rank_0.log").write_bytes(b"old\n")
    tmp_path.chmod(0o755)
    with (tmp_path / "rank_0.log").open("rb") as reader:
        assert write(tmp_path, b"new\n") == b"new\n"
        assert reader.read() == b"old\n"
    assert mode_of(tmp_path / "rank_0.log") == 0o600
    assert mode_of(tmp_path) == 0o755


def test_the_log_of_a_restarted_rank_is_continued(tmp_path):
    folder = LogFolder(tmp_path, pytest.fail)
    folder.open(3).write(b"one\n")
    folder.open(3).write(b"two\n")
    folder.close()
    folder.close()
    assert (tmp_path / "rank_3.log").read_bytes() == b"one\ntwo\n"


def test_children_do_not_inherit_logs(tmp_path):
    folder = LogFolder(tmp_path, pytest.fail)
    assert not os.get_inheritable(folder.open(0).fileno())
    folder.close()


def test_a_log_that_is_a_link_is_refused_and_its_target_stays(tmp_path):
    target = tmp_path / "precious"
    target.write_bytes(b"content")
    (tmp_path / "rank_0.log").symlink_to(target)
    refused(tmp_path, "symbolic link; remove it")
    assert target.read_bytes() == b"content"


def test_a_log_with_another_name_is_refused_and_stays(tmp_path):
    target = tmp_path / "precious"
    target.write_bytes(b"content")
    os.link(target, tmp_path / "rank_0.log")
    refused(tmp_path, "hard link")
    assert target.read_bytes() == b"content"


def test_a_fifo_is_refused_without_waiting_for_its_reader(tmp_path):
    os.mkfifo(tmp_path / "rank_0.log")
    refused(tmp_path, "not a regular file; remove it")
    reader = os.open(tmp_path / "rank_0.log", os.O_RDONLY | os.O_NONBLOCK)
    refused(tmp_path, "not a regular file")
    os.close(reader)


@as_root
def test_a_log_that_another_user_has_made_is_refused(tmp_path):
    log = tmp_path / "rank_0.log"
    log.touch()
    os.chown(log, OTHER_USER, -1)
    refused(tmp_path, "belongs to another user")


def test_the_folder_may_be_a_link_of_this_user(tmp_path):
    (tmp_path / "large disk").mkdir()
    (tmp_path / "logs").symlink_to("large disk")
    assert write(tmp_path / "logs") == b"output\n"
    assert (tmp_path / "large disk" / "rank_0.log").exists()


@as_root
@pytest.mark.parametrize("below", ["", "sub"])
def test_a_link_that_another_user_put_into_a_shared_folder_is_refused(tmp_path, below):
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "home").mkdir()
    (shared / "logs").symlink_to(tmp_path / "home")
    os.chown(shared / "logs", OTHER_USER, -1, follow_symlinks=False)
    assert write(shared / "logs") == b"output\n", "nobody else can write there"
    shared.chmod(0o1777)
    refused(shared / "logs" / below, "another user has made")
    os.chown(shared, OTHER_USER, -1)
    assert write(shared / "logs") == b"output\n", "it is his folder"


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "--log-dir .*exists")
    refused(tmp_path / "file" / "sub", "--log-dir .*ot a directory")
