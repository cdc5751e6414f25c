"""Environment variables: the default time limit, misspelled names, and those of Kubernetes."""

import logging
import math
import os
import re
from pathlib import Path

import pytest

import rankwire
from children import Child
from launched import COMMAND
from rankwire.backends.simulated import SimulatedBackend
from rankwire.environment import KNOWN, default_timeout, report_unknown, without_services
from rankwire.errors import ConfigurationError
from rankwire.rendezvous.schedulers import find_assignment

SOURCE = Path(rankwire.__file__).parent
SETTINGS = Path(__file__).parents[1] / "docs" / "settings.md"
# What Kubernetes sets for a service "rankwire" with a named port.
OF_SERVICE = {
    "RANKWIRE_SERVICE_HOST": "10.0.171.239",
    "RANKWIRE_SERVICE_PORT": "1234",
    "RANKWIRE_SERVICE_PORT_RENDEZVOUS": "1234",
    "RANKWIRE_PORT": "tcp://10.0.171.239:1234",
    "RANKWIRE_PORT_1234_TCP": "tcp://10.0.171.239:1234",
    "RANKWIRE_PORT_1234_TCP_PROTO": "tcp",
    "RANKWIRE_PORT_1234_TCP_PORT": "1234",
    "RANKWIRE_PORT_1234_TCP_ADDR": "10.0.171.239",
}
OF_SERVICE |= {
    name.replace("RANKWIRE", "RANKWIRE_TRAINING"): value for name, value in OF_SERVICE.items()
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("RANKWIRE_") and name != "RANKWIRE_RUNTIME_DIR":
            monkeypatch.delenv(name)
    report_unknown.cache_clear()
    yield monkeypatch
    report_unknown.cache_clear()


@pytest.fixture
def launch(tmp_path):
    """Run a program on some ranks, with the environment as it is now."""

    def run(ranks, program):
        script = tmp_path / "program.py"
        script.write_text(program)
        return Child([*COMMAND, "-n", str(ranks), str(script)], env=dict(os.environ)).result(30)

    return run


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- the time limit


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 60.0), ("5", 5.0), ("0.25", 0.25), (" 7 ", 7.0), ("inf", math.inf)]
)
def test_the_variable_is_the_limit_of_a_world_without_one(environment, text, seconds):
    environment.setenv("RANKWIRE_TIMEOUT", text)
    assert default_timeout() == seconds
    world = SimulatedBackend.create_group(2)
    assert [backend.timeout for backend in world] == [seconds] * 2
    with rankwire.RpcAgent(world[0]) as agent:
        assert agent.timeout == seconds
    for backend in world:
        backend.close()


def test_a_limit_of_the_program_wins(environment):
    environment.setenv("RANKWIRE_TIMEOUT", "5")
    (backend,) = SimulatedBackend.create_group(1, timeout=3.0)
    with backend:
        assert backend.timeout == 3.0


@pytest.mark.parametrize("text", ["5s", "never", "-1", "0", "nan", "1,5"])
def test_a_limit_that_is_no_number_of_seconds_is_an_error_that_shows_it(environment, text):
    environment.setenv("RANKWIRE_TIMEOUT", text)
    with pytest.raises(ConfigurationError) as caught:
        SimulatedBackend.create_group(1)
    assert str(caught.value).startswith(f"RANKWIRE_TIMEOUT is {text!r}: set it to a number of")
    with pytest.raises(ConfigurationError, match="RANKWIRE_TIMEOUT"):
        rankwire.local(1)


RECEIVES_FIRST = """
import rankwire
with rankwire.connect() as backend:
    print(backend.timeout)
    if backend.rank == 0:
        backend.recv(1)
    else:
        backend.recv(0, timeout=50)
"""


def test_the_ranks_of_a_launched_job_have_the_limit(environment, launch):
    environment.setenv("RANKWIRE_TIMEOUT", "0.5")
    done = launch(2, RECEIVES_FIRST)
    assert done.returncode == 1
    assert done.stdout.count("0.5\n") == 2
    assert "no result within 0.5 s waiting for rank 1" in done.stderr


def test_a_job_with_an_invalid_limit_is_not_started(environment, launch):
    environment.setenv("RANKWIRE_TIMEOUT", "soon")
    done = launch(2, "print('started')")
    assert done.returncode == 2
    assert "RANKWIRE_TIMEOUT is 'soon'" in done.stderr
    assert "Traceback" not in done.stderr
    assert "started" not in done.stdout


# -- unknown names


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("RANKWIRE_TIMOUT", ": did you mean RANKWIRE_TIMEOUT?"),
        ("RANKWIRE_SECRETFILE", ": did you mean RANKWIRE_SECRET_FILE?"),
        ("RANKWIRE_TLS_CERTIFICATE", ": did you mean RANKWIRE_TLS_CERT?"),
        ("RANKWIRE_QXZ", ""),
    ],
)
def test_an_unknown_variable_is_logged_once_with_the_nearest_known_name(
    environment, caplog, recwarn, name, ending
):
    environment.setenv(name, "1")
    for _ in range(2):
        for backend in SimulatedBackend.create_group(2):
            backend.close()
    assert warnings(caplog) == [f"rankwire does not know the variable {name}{ending}"]
    assert not recwarn


def test_known_variables_are_not_logged(environment, caplog):
    for name in KNOWN - {"RANKWIRE_TIMEOUT"}:
        environment.setenv(name, "1")
    report_unknown()
    assert warnings(caplog) == []


def test_one_rank_of_a_launched_job_logs_an_unknown_variable(environment, launch):
    environment.setenv("RANKWIRE_TIMOUT", "5")
    done = launch(3, "import rankwire\nrankwire.connect().close()\n")
    assert done.returncode == 0
    assert done.stderr.count("RANKWIRE_TIMOUT: did you mean RANKWIRE_TIMEOUT?") == 1


def test_the_page_lists_every_variable_and_no_other():
    rows = re.findall(r"^\| (`RANKWIRE_.*?) \|", SETTINGS.read_text(), flags=re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"RANKWIRE_\w+", row)}
    assert listed == KNOWN


def test_the_source_names_no_other_variable():
    """Every literal text that is such a name."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        found |= set(re.findall(r"[\"'](RANKWIRE_[A-Z_]*[A-Z])[\"']", path.read_text()))
    assert found <= KNOWN
    assert len(found) > 20


# -- what Kubernetes sets


def test_variables_of_a_service_with_our_name_are_not_ours(environment, caplog):
    for name, value in OF_SERVICE.items():
        environment.setenv(name, value)
    assert without_services(OF_SERVICE | {"RANKWIRE_RANK": "1"}) == {"RANKWIRE_RANK": "1"}
    report_unknown()
    assert warnings(caplog) == []


def test_the_port_of_a_service_is_not_taken_for_that_of_the_world():
    plain = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    assert find_assignment(plain | OF_SERVICE).address == "node0:29500"
    assert find_assignment(plain | {"RANKWIRE_PORT": "4000"}).address == "node0:4000"
