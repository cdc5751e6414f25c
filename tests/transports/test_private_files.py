"""Files that only this user may read: what was checked is what is read."""

import fcntl
import os
import socket

import pytest

from rankwire.errors import ConfigurationError
from rankwire.transports.private_files import MAX_PRIVATE_NBYTES, open_private, read_private

OTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"mine")
    path.chmod(0o600)
    return path


def refused(path, match):
    with pytest.raises(ConfigurationError, match=match) as caught:
        read_private(path, named="the file")
    assert str(caught.value).startswith("the file")


def test_a_file_of_this_user_closed_to_others_is_read(secret):
    assert read_private(secret, named="the file") == b"mine"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o777])
def test_a_file_that_is_open_to_others_is_refused(secret, mode):
    secret.chmod(mode)
    refused(secret, "closed to others")


@as_root
def test_a_file_of_another_user_is_refused(secret):
    os.chown(secret, OTHER_USER, -1)
    refused(secret, "must belong to this user")


def test_a_missing_file_is_said_to_be(tmp_path):
    refused(tmp_path / "none", "No such file")


def test_a_fifo_is_refused_without_waiting_for_its_writer(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path, 0o600)
    refused(path, "not a regular file")


def test_a_device_a_socket_and_a_folder_are_refused(tmp_path):
    refused("/dev/zero", "not a regular file")
    refused(tmp_path, "not a regular file")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        refused(tmp_path / "socket", "No such device")


def test_a_file_that_is_too_large_is_refused(secret):
    with secret.open("r+b") as file:
        file.truncate(MAX_PRIVATE_NBYTES + 1)
    refused(secret, "more than 1048576 bytes")


def test_own_links_are_followed_and_what_they_lead_to_is_checked(tmp_path, secret):
    (tmp_path / "data").symlink_to("secret")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert read_private(tmp_path / "link", named="the file") == b"mine"
    secret.chmod(0o644)
    refused(tmp_path / "link", "closed to others")


def test_links_without_end_are_refused(tmp_path):
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    refused(tmp_path / "one", "too many symbolic links")


@as_root
def test_a_link_of_another_user_is_refused(tmp_path, secret):
    """It could lead to a file of this user whose content he knows."""
    link = tmp_path / "link"
    link.symlink_to(secret)
    os.chown(link, OTHER_USER, -1, follow_symlinks=False)
    # As root everything belongs to root's rights: what is checked is who made the link.
    refused(link, "another user has made")


def test_children_do_not_inherit_it(secret):
    with open_private(secret, named="the file") as descriptor:
        assert not os.get_inheritable(descriptor)


def test_a_file_that_is_exchanged_after_the_check_is_not_read(tmp_path, secret, monkeypatch):
    """As another user can do in a folder that he can write."""
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"theirs")
    check = os.fstat

    def check_and_exchange(descriptor):
        status = check(descriptor)
        is_of_content = not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH
        if is_of_content and foreign.exists():
            foreign.rename(secret)
        return status

    monkeypatch.setattr(os, "fstat", check_and_exchange)
    assert read_private(secret, named="the file") == b"mine"
    assert secret.read_bytes() == b"theirs", "it was exchanged"


def test_a_file_that_is_exchanged_before_the_check_is_refused(tmp_path, secret, monkeypatch):
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"theirs")
    check = os.fstat

    def check_and_exchange(descriptor):
        if foreign.exists():
            foreign.rename(secret)
        return check(descriptor)

    monkeypatch.setattr(os, "fstat", check_and_exchange)
    refused(secret, "closed to others")
