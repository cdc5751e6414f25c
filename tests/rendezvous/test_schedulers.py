"""What each launcher leaves, read from a dict; and the real ones, with real processes."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from faults.netns import Hosts, why_not
from rankwire.errors import ConfigurationError
from rankwire.rendezvous.schedulers import HYDRA_JOB, LAUNCHERS, find_assignment

OURS = {"RANKWIRE_RANK": "1", "RANKWIRE_WORLD_SIZE": "4", "RANKWIRE_ADDRESS": "h:5"}
PLAIN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "master", "MASTER_PORT": "29500"}
TORCHRUN = PLAIN | {"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "abc"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_ess_base_jobid": "927334401",
    "OMPI_MCA_orte_hnp_uri": "927334400.0;tcp://192.0.2.2,10.0.0.2:44807;tcp6://[fd00::2]:5",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", HYDRA_JOB: "77"}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
}
ALL = {
    "rankwire": OURS,
    "torchrun": TORCHRUN,
    "openmpi": OPEN_MPI,
    "mpich": MPICH,
    "slurm": SLURM,
    "env": PLAIN,
}


def port_of(place) -> int:
    return int(place.address.rpartition(":")[2])


@pytest.mark.parametrize(
    ("environ", "host", "job", "launcher"),
    [
        (OURS, "h", "default", "rankwire run"),
        (TORCHRUN, "master", "torchrun-abc-0", "torchrun"),
        (OPEN_MPI, "127.0.0.1", "openmpi-927334401", "Open MPI mpiexec"),
        (MPICH, "127.0.0.1", "mpich-77", "MPICH mpiexec"),
        (SLURM, "gpu07", "slurm-12.3", "Slurm srun"),
        (PLAIN, "master", "default", "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"),
    ],
    ids=ALL,
)
def test_a_place(environ, host, job, launcher):
    place = find_assignment(environ)
    assert (place.rank, place.world_size) == (1, 4)
    assert place.address.rpartition(":")[0] == host
    assert (place.job, place.launcher) == (job, launcher)
    assert not place.has_coordinator


@pytest.mark.parametrize("key", ["torchrun", "openmpi", "mpich", "slurm"])
def test_a_port_for_the_job_below_the_outgoing_ones(key):
    environ = ALL[key]
    port = port_of(find_assignment(environ))
    assert 20_000 <= port < 30_000
    assert port == port_of(find_assignment(environ))
    assert port_of(find_assignment(environ | {"RANKWIRE_PORT": "4000"})) == 4000
    assert find_assignment(environ | {"RANKWIRE_ADDRESS": "there:9"}).address == "there:9"


def test_another_job_another_port():
    other_jobs = [
        (TORCHRUN, {"TORCHELASTIC_RUN_ID": "b"}),
        (TORCHRUN, {"MASTER_PORT": "29600"}),
        (OPEN_MPI, {"OMPI_MCA_ess_base_jobid": "2"}),
        (MPICH, {HYDRA_JOB: "78"}),
        (SLURM, {"SLURM_JOB_ID": "13"}),
        (SLURM, {"SLURM_STEP_ID": "4"}),
    ]
    for environ, change in other_jobs:
        assert port_of(find_assignment(environ)) != port_of(find_assignment(environ | change))


def test_the_innermost_launcher_wins():
    everything = {name: value for environ in ALL.values() for name, value in environ.items()}
    everything.pop("RANKWIRE_ADDRESS")
    order = [launcher.key for launcher in LAUNCHERS]
    assert order == list(ALL)
    for index, launcher in enumerate(LAUNCHERS):
        left = {}
        for key in order[index:]:
            left |= ALL[key]
        assert find_assignment(left).launcher == find_assignment(ALL[launcher.key]).launcher


def test_the_user_may_choose_another():
    both = SLURM | PLAIN
    assert find_assignment(both).launcher == "Slurm srun"
    assert find_assignment(both | {"RANKWIRE_LAUNCHER": "env"}).address == "master:29500"
    with pytest.raises(ConfigurationError, match="not one of rankwire, torchrun"):
        find_assignment(both | {"RANKWIRE_LAUNCHER": "pbs"})
    with pytest.raises(ConfigurationError, match="Looked for:\n  torchrun"):
        find_assignment({"RANKWIRE_LAUNCHER": "torchrun"})


def test_nothing_fits_and_all_that_was_looked_for_is_named():
    with pytest.raises(ConfigurationError, match=r"rankwire run -n 4 script\.py") as caught:
        find_assignment({"RANK": "3", "MASTER_PORT": "1", "SLURM_PROCID": "0"})
    text = str(caught.value)
    for launcher in LAUNCHERS:
        assert all(name in text for name in launcher.needs)
    assert "(RANK, MASTER_PORT set, but not WORLD_SIZE and MASTER_ADDR)" in text
    assert "(SLURM_PROCID set, but not SLURM_NTASKS and SLURM_JOB_ID and SLURM_STEP_ID)" in text


def test_our_own_but_incomplete_is_not_taken_for_anothers():
    with pytest.raises(ConfigurationError, match="not RANKWIRE_ADDRESS"):
        find_assignment(PLAIN | {"RANKWIRE_RANK": "0", "RANKWIRE_WORLD_SIZE": "1"})


@pytest.mark.parametrize("key", ALL)
def test_what_is_no_number_and_what_is_no_rank(key):
    environ = ALL[key]
    rank = next(name for name in environ if name.endswith(("RANK", "PROCID")))
    with pytest.raises(ConfigurationError, match=f"{rank} is 'one'"):
        find_assignment(environ | {rank: "one"})
    with pytest.raises(ConfigurationError, match="rank 4 of 4 ranks"):
        find_assignment(environ | {rank: "4"})


def test_a_straggler_of_the_last_attempt_has_another_job():
    again = find_assignment(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.job != find_assignment(TORCHRUN).job
    assert again.address == find_assignment(TORCHRUN).address


def test_open_mpi_on_several_hosts():
    several = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert find_assignment(several).address.startswith("192.0.2.2:")
    assert find_assignment(several | {"MASTER_ADDR": "first"}).address.startswith("first:")
    del several["OMPI_MCA_orte_hnp_uri"]
    with pytest.raises(ConfigurationError, match="RANKWIRE_ADDRESS=host:port"):
        find_assignment(several)
    assert find_assignment(OPEN_MPI | {"PMIX_NAMESPACE": "prte-7"}).job == "openmpi-prte-7"


# As Open MPI 4.1.4 sets them when mpiexec runs on 10.99.0.1 and the ranks on .2 and .3.
FROM_OUTSIDE = OPEN_MPI | {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "1937768448.0;tcp://10.99.0.1:48223",
    "OMPI_MCA_orte_node_regex": "vm,[2:10].99.0.2,[2:10].99.0.3@0(3)",
}


def addresses(environ: dict[str, str]) -> list[str]:
    place = find_assignment(environ)
    return [address.rpartition(":")[0] for address in (place.address, *place.others)]


def test_open_mpi_from_outside_of_its_hosts():
    first = FROM_OUTSIDE | {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_MCA_orte_local_daemon_uri": "1937768448.1;tcp://10.99.0.2,10.98.0.2:48697",
    }
    other = FROM_OUTSIDE | {
        "OMPI_MCA_orte_local_daemon_uri": "1937768448.2;tcp://10.99.0.3:33367",
    }
    assert addresses(first) == ["10.99.0.2", "10.98.0.2"]
    assert addresses(other) == ["10.99.0.1", "10.99.0.2", "10.99.0.3"]
    assert port_of(find_assignment(first)) == port_of(find_assignment(other))
    for said in ({"MASTER_ADDR": "there"}, {"RANKWIRE_ADDRESS": "there:5"}):
        assert addresses(first | said) == addresses(other | said) == ["there"]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_open_mpi_on_the_host_of_mpiexec(rank):
    here = FROM_OUTSIDE | {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_MCA_orte_local_daemon_uri": FROM_OUTSIDE["OMPI_MCA_orte_hnp_uri"],
    }
    assert addresses(here) == ["10.99.0.1"]


def test_mpich_on_several_hosts_or_without_its_proxy():
    several = MPICH | {"MPI_LOCALNRANKS": "2"}
    with pytest.raises(ConfigurationError, match="RANKWIRE_ADDRESS=host:port"):
        find_assignment(several)
    here = find_assignment(several | {"MASTER_ADDR": "first"})
    there = find_assignment(several | {"MASTER_ADDR": "first", HYDRA_JOB: "99"})
    assert (here.address, here.job) == (there.address, there.job)
    with pytest.raises(ConfigurationError, match="RANKWIRE_ADDRESS=host:port"):
        find_assignment(MPICH | {HYDRA_JOB: ""})
    assert find_assignment(MPICH | {HYDRA_JOB: "", "RANKWIRE_PORT": "7"}).address == "127.0.0.1:7"


@pytest.mark.parametrize(
    "allocation",
    [
        {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "gpu[07-08]"},
        {"LSB_JOBID": "12", "LSB_MCPU_HOSTS": "gpu07 2 gpu08 2"},
    ],
    ids=["Slurm", "LSF"],
)
def test_mpi_on_several_hosts_of_a_batch_system(allocation):
    """The list says where rank 0 may be, if mpiexec itself does not."""
    silent = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    del silent["OMPI_MCA_orte_hnp_uri"]
    for environ in (MPICH | {"MPI_LOCALNRANKS": "2"}, silent):
        assert addresses(environ | allocation) == ["gpu07", "gpu08"]
        assert addresses(environ | allocation | {"MASTER_ADDR": "there"}) == ["there"]
        assert addresses(environ | allocation | {"RANKWIRE_ADDRESS": "there:1"}) == ["there"]
    several = MPICH | {"MPI_LOCALNRANKS": "2"}
    assert find_assignment(several | allocation).address != find_assignment(
        several | allocation | dict.fromkeys(("SLURM_JOB_ID", "LSB_JOBID"), "13")
    ).address  # fmt: skip


def test_srun_with_pmi2_is_slurm_and_mpiexec_inside_slurm_is_mpich():
    pmi2 = SLURM | {"PMI_RANK": "1", "PMI_SIZE": "4"}
    assert find_assignment(pmi2).launcher == "Slurm srun"
    assert find_assignment(SLURM | MPICH).launcher == "MPICH mpiexec"


def test_slurm_on_one_host_and_in_a_batch_script():
    assert find_assignment(SLURM | {"SLURM_STEP_NUM_NODES": "1"}).address.startswith("127.0.0.1:")
    assert find_assignment(SLURM | {"SLURM_STEP_NUM_TASKS": "2"}).world_size == 2
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    with pytest.raises(ConfigurationError, match="not SLURM_STEP_ID"):
        find_assignment(batch)


def test_an_ipv6_master():
    assert find_assignment(PLAIN | {"MASTER_ADDR": "fd00::1"}).address == "[fd00::1]:29500"


# -- the real ones -------------------------------------------------------------------------------

SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
import rankwire
with rankwire.connect(join_timeout=25.0) as backend:
    total = rankwire.all_gather_object(backend, backend.rank)
    print(f"sum {sum(total)} of {backend.world_size}", flush=True)
"""


@pytest.fixture
def launch(tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    source = str(Path(__file__).parents[2] / "src")

    def start(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        variables["PYTHONPATH"] = f"{source}:{os.environ.get('PYTHONPATH', '')}"
        return subprocess.run(
            [*command, str(path)],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    return start


def check(done: subprocess.CompletedProcess[str], launcher: str) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3 of 3") == 3, done
    assert done.stderr.count(f"started by {launcher}") == 3


def find_program(*candidates: str) -> str:
    beside = Path(sys.executable).parent
    for name in candidates:
        for path in (shutil.which(name), shutil.which(name, path=str(beside))):
            if path is not None:
                return path
    pytest.skip(f"{candidates[0]} is not installed")


def test_torchrun(launch):
    torchrun = find_program("torchrun")
    done = launch(torchrun, "--standalone", "--nproc-per-node", "3")
    check(done, "torchrun")


def test_open_mpi(launch):
    mpiexec = find_program("mpiexec.openmpi", "mpirun.openmpi")
    options = ("--allow-run-as-root", "--oversubscribe", "-n", "3")
    check(launch(mpiexec, *options, sys.executable), "Open MPI mpiexec")


@pytest.fixture
def remote_shell(tmp_path: Path):
    """Three hosts, and what starts programs on them as ssh would: the hosts, the program."""
    if why_not():
        pytest.skip(why_not())
    with contextlib.closing(Hosts(3)) as hosts:
        shell = tmp_path / "shell"
        # Each with files of its own: daemons of one name that share them remove each other's.
        shell.write_text(
            "#!/bin/sh\nhost=$1; shift; number=$((${host##*.} - 1))\n"
            f"export TMPDIR={tmp_path}/$number; mkdir $TMPDIR\n"
            f'exec ip netns exec {hosts.namespace(0)[:-1]}$number sh -c "$*"\n'
        )
        shell.chmod(0o700)
        yield hosts, str(shell)


@pytest.mark.parametrize("taking_part", [(1, 2), (0, 1, 2)], ids=["from outside", "from inside"])
def test_open_mpi_on_several_hosts_for_real(launch, remote_shell, tmp_path, taking_part):
    mpiexec = find_program("mpiexec.openmpi", "mpirun.openmpi")
    hosts, shell = remote_shell
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("a secret of these three hosts")
    done = launch(
        "ip", "netns", "exec", hosts.namespace(0), mpiexec, "--allow-run-as-root",
        "--mca", "plm_rsh_agent", shell, "-x", "PYTHONPATH", "-x", "RANKWIRE_SECRET_FILE",
        "-H", ",".join(f"{hosts.address(host)}:1" for host in taking_part),
        "-n", str(len(taking_part)), sys.executable,
        RANKWIRE_SECRET_FILE=str(secret),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    size = len(taking_part)
    assert done.stdout.count(f"sum {sum(range(size))} of {size}") == size, done


def test_mpich(launch):
    mpiexec = find_program("mpiexec.hydra")
    check(launch(mpiexec, "-n", "3", sys.executable), "MPICH mpiexec")


def test_mpich_with_a_shell_in_between(launch):
    mpiexec = find_program("mpiexec.hydra")
    wrapped = ("sh", "-c", f'{sys.executable} "$0"; exit $?')
    check(launch(mpiexec, "-n", "3", *wrapped), "MPICH mpiexec")
