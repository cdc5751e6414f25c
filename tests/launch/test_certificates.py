"""The job's own authority: its certificates work, are closed to others, and cannot be extended."""

import datetime
import stat

import pytest

from rankwire.errors import ConfigurationError
from rankwire.launch.certificates import make_certificates
from rankwire.transports.security import files_of
from rankwire.transports.tls import TlsContexts

x509 = pytest.importorskip("cryptography.x509")


def load(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_each_rank_has_a_certificate_that_names_it_and_the_authority_signed(tmp_path):
    made = make_certificates(tmp_path / "tls", 3)
    authority = load(made[0].ca)
    for rank, files in enumerate(made):
        certificate = load(files.cert)
        certificate.verify_directly_issued_by(authority)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [f"rank-{rank}"]
        assert certificate.public_key().curve.name == "secp256r1"
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert len({load(files.cert).serial_number for files in made}) == 3


def test_only_this_user_can_read_them_and_the_authoritys_key_is_nowhere(tmp_path):
    make_certificates(tmp_path / "tls", 2)
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    files = sorted((tmp_path / "tls").iterdir())
    assert [file.name for file in files] == [
        "ca.pem", "launcher.key", "launcher.pem",
        "rank-0.key", "rank-0.pem", "rank-1.key", "rank-1.pem",
    ]  # fmt: skip
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_launchers_and_ranks_find_their_files_again(tmp_path):
    made = make_certificates(tmp_path / "tls", 2)
    assert [files_of(tmp_path / "tls", rank) for rank in range(2)] == made
    launcher = files_of(str(tmp_path / "tls"), "launcher")
    load(launcher.cert).verify_directly_issued_by(load(made[0].ca))
    assert load(launcher.cert).subject.rfc4514_string() == "CN=launcher"
    TlsContexts(launcher)  # the key is that of the certificate


@pytest.mark.parametrize(
    ("lost", "who"),
    [
        (["ca.pem"], "launcher"),
        (["launcher.key"], "launcher"),
        (["rank-1.pem", "rank-1.key"], 1),
        (["ca.pem", "rank-0.key"], 0),
    ],
)
def test_files_that_are_missing_are_named_and_no_others(tmp_path, lost, who):
    folder = tmp_path / "tls"
    make_certificates(folder, 2)
    for name in lost:
        (folder / name).unlink()
    with pytest.raises(ConfigurationError) as caught:
        files_of(folder, who)
    assert str(folder) in str(caught.value)
    owners = ("launcher", "rank-0", "rank-1")
    files = ["ca.pem", *(f"{owner}.{kind}" for owner in owners for kind in ("pem", "key"))]
    named = [file for file in files if file in str(caught.value)]
    assert sorted(named) == sorted(lost)


def test_they_are_good_for_the_days_asked_for(tmp_path):
    certificate = load(make_certificates(tmp_path / "tls", 1, days=2)[0].cert)
    now = datetime.datetime.now(datetime.UTC)
    assert certificate.not_valid_before_utc < now
    left = certificate.not_valid_after_utc - now
    assert datetime.timedelta(days=1.9) < left <= datetime.timedelta(days=2)


def test_a_folder_that_is_there_already_is_not_written_to(tmp_path):
    with pytest.raises(ConfigurationError, match="exists"):
        make_certificates(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("world_size", "days"), [(0, 1), (-1, 1), (1, 0), (1, -1)])
def test_invalid_arguments_are_refused(tmp_path, world_size, days):
    with pytest.raises(ConfigurationError):
        make_certificates(tmp_path / "tls", world_size, days=days)
    assert not (tmp_path / "tls").exists()
