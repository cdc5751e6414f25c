"""Read the rank of this process from the environment variables of its launcher.

Other launchers provide no port, so their readers derive one from the job's identity, below the
kernel's range for outgoing connections, unless the user has set one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from rankwire.environment import RANK, without_services
from rankwire.errors import ConfigurationError

WORLD_SIZE = "RANKWIRE_WORLD_SIZE"
ADDRESS = "RANKWIRE_ADDRESS"
JOB = "RANKWIRE_JOB"
# "launcher" if the launcher coordinates the world instead of rank 0.
COORDINATOR = "RANKWIRE_COORDINATOR"
# How many times `rankwire run` started this rank before.
RESTART_COUNT = "RANKWIRE_RESTART_COUNT"
# The port for worlds of other launchers, and which launcher to use if several are found.
PORT = "RANKWIRE_PORT"
LAUNCHER = "RANKWIRE_LAUNCHER"
# Hydra sets no variable that identifies a job, so the caller passes the id of Hydra's process.
HYDRA_JOB = "(process id of Hydra's proxy)"

OURS = "rankwire run"
_LOOPBACK = "127.0.0.1"
_MOST_HOSTS = 65536
_FIRST_PORT, _PORTS = 20_000, 10_000  # Linux uses ports from 32768 on for outgoing connections

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_NAME = re.compile(rf"(?:[^\[\],]|{_BRACKETS.pattern})+")
_DIGITS = re.compile(r"\[(\d+):([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The rank of this process, and where its world forms."""

    rank: int
    world_size: int
    address: str  # ``host:port`` of rank 0, or of the launcher if it coordinates
    job: str = "default"
    launcher: str = OURS
    has_coordinator: bool = False
    advice: str = ""  # what to try if the world does not form
    secret: bytes | None = field(default=None, repr=False)  # None: the backend finds one
    others: tuple[str, ...] = ()  # other possible hosts of rank 0, if its host is not known

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(
                f"{self.launcher} says that this is rank {self.rank} of {self.world_size} ranks:"
                " ranks count from 0"
            )


class Launcher(NamedTuple):
    """One kind of launcher. It always sets the variables that it ``needs``."""

    name: str
    key: str  # in ``RANKWIRE_LAUNCHER``
    needs: tuple[str, ...]
    read: Callable[[Environment], Assignment | None]  # None: another launcher set the variables


def find_assignment(environ: Environment) -> Assignment:
    """Return the innermost launcher's assignment; raise ConfigurationError if there is none."""
    environ = without_services(environ)
    for launcher in _wanted(environ):
        if all(environ.get(name) for name in launcher.needs):
            place = launcher.read(environ)
            if place is not None:
                return place
        elif environ.get(RANK) and launcher.needs[0] == RANK:
            break  # ours are incomplete: do not use another launcher's variables instead
    raise ConfigurationError(_nothing_fits(environ))


def _wanted(environ: Environment) -> tuple[Launcher, ...]:
    key = environ.get(LAUNCHER)
    if not key:
        return LAUNCHERS
    wanted = tuple(launcher for launcher in LAUNCHERS if launcher.key == key)
    if not wanted:
        known = ", ".join(launcher.key for launcher in LAUNCHERS)
        raise ConfigurationError(f"{LAUNCHER} is {key!r}, not one of {known}")
    return wanted


def _nothing_fits(environ: Environment) -> str:
    lines = ["no launcher started this process. Looked for:"]
    for launcher in _wanted(environ):
        missing = [name for name in launcher.needs if not environ.get(name)]
        line = f"  {launcher.name}: {', '.join(launcher.needs)}"
        if 0 < len(missing) < len(launcher.needs):
            there = [name for name in launcher.needs if environ.get(name)]
            line += f" ({', '.join(there)} set, but not {' and '.join(missing)})"
        lines.append(line)
    lines.append(
        "Start it with `rankwire run -n 4 script.py`, or build a TcpBackend from your own settings"
    )
    return "\n".join(lines)


def read_rankwire_run(environ: Environment) -> Assignment:
    """Read the variables of ``rankwire run``; users may set the first three."""
    return Assignment(
        rank=read_integer(environ, RANK),
        world_size=read_integer(environ, WORLD_SIZE),
        address=environ[ADDRESS],
        job=environ.get(JOB, "default"),
        has_coordinator=environ.get(COORDINATOR) == "launcher",
    )


def read_torchrun(environ: Environment) -> Assignment:
    """Read the variables of torchrun, whose own store listens at ``MASTER_PORT``."""
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    run = environ["TORCHELASTIC_RUN_ID"]
    seed = f"torchrun {host} {port} {run}"
    # With the count, so that a process of an earlier attempt cannot join.
    job = f"torchrun-{run}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return _derived(environ, "torchrun", ("RANK", "WORLD_SIZE"), job, [host], seed)


def read_open_mpi(environ: Environment) -> Assignment:
    """Read the variables of Open MPI's ``mpiexec``."""
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    hosts = [_LOOPBACK]
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") != environ["OMPI_COMM_WORLD_SIZE"]:
        named = environ.get("MASTER_ADDR")
        hosts = [named] if named else _hosts_of_open_mpi(environ) or _hosts_of_allocation(environ)
    seed = f"openmpi {job}" if job else ""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    return _derived(environ, "Open MPI mpiexec", names, f"openmpi-{job}", hosts, seed)


def _hosts_of_open_mpi(environ: Environment) -> list[str]:
    """Return possible hosts of rank 0, the likeliest first; on rank 0, names of its own host.

    Open MPI 4 gives each rank the addresses of ``mpiexec`` (daemon 0) and of its own host's daemon
    and, except on the host of ``mpiexec``, the hosts of all daemons. Rank 0 is on the host of
    ``mpiexec`` if that runs ranks, else on the first of the others, unless the user maps ranks.
    """
    _, head = _daemon(environ.get("OMPI_MCA_orte_hnp_uri", ""))
    own, here = _daemon(environ.get("OMPI_MCA_orte_local_daemon_uri", ""))
    nodes = environ.get("OMPI_MCA_orte_node_regex", "")
    names = expand_nodes_of_open_mpi(nodes) if nodes else []
    if environ["OMPI_COMM_WORLD_RANK"] == "0" and own > 0 and here:
        return list(dict.fromkeys([*names[own : own + 1], *here]))
    if environ["OMPI_COMM_WORLD_RANK"] == "0" or own == 0:
        return head[:1]
    return list(dict.fromkeys([*head[:1], *names[1:]]))


def _daemon(uri: str) -> tuple[int, list[str]]:
    """Parse a daemon's number and addresses: ``"927.1;tcp://10.0.0.1,10.1.0.1:4444"``."""
    number = re.match(r"\d+\.(\d+);", uri)
    found = re.search(r"tcp://([^:;]+)", uri)
    return int(number[1]) if number else -1, found[1].split(",") if found else []


def read_mpich(environ: Environment) -> Assignment | None:
    """Read the variables of the ``mpiexec`` of MPICH, Hydra and Intel MPI."""
    if "MPI_LOCALNRANKS" not in environ and "SLURM_PROCID" in environ:
        return None  # srun --mpi=pmi2 sets PMI_RANK too
    proxy = environ.get(HYDRA_JOB, "")
    job, hosts, seed = f"mpich-{proxy}", [_LOOPBACK], f"mpich {proxy}" if proxy else ""
    if environ.get("MPI_LOCALNRANKS") != environ["PMI_SIZE"]:
        named = environ.get("MASTER_ADDR")
        hosts = [named] if named else _hosts_of_allocation(environ)
        # Each host has its own proxy, so the proxy's number does not identify the job.
        batch_job = environ.get("SLURM_JOB_ID") or environ.get("LSB_JOBID") or ""
        job, seed = "mpich", f"mpich several {batch_job}"
    return _derived(environ, "MPICH mpiexec", ("PMI_RANK", "PMI_SIZE"), job, hosts, seed)


def read_slurm(environ: Environment) -> Assignment:
    """Read the variables of Slurm's ``srun``."""
    job = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    hosts = [next(expand_nodes(nodes))] if nodes else []
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        hosts = [_LOOPBACK]
    # SLURM_NTASKS may be that of the whole allocation.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    names = ("SLURM_PROCID", size)
    return _derived(environ, "Slurm srun", names, f"slurm-{job}", hosts, f"slurm {job}")


def read_plain(environ: Environment) -> Assignment:
    """Read ``RANK`` and its companions, as Kubernetes operators and scripts set them."""
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    address = _join(host, environ.get(PORT) or port)
    return Assignment(
        rank=read_integer(environ, "RANK"),
        world_size=read_integer(environ, "WORLD_SIZE"),
        address=environ.get(ADDRESS) or address,
        job=environ.get(JOB, "default"),
        launcher="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        advice=(
            "the address is that of MASTER_ADDR and MASTER_PORT; if rank 0 also uses"
            f" torch.distributed, which listens there, give {PORT} another port"
        ),
    )


# Innermost launcher first.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(OURS, "rankwire", (RANK, WORLD_SIZE, ADDRESS), read_rankwire_run),
    Launcher(
        "torchrun",
        "torchrun",
        ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        read_torchrun,
    ),
    Launcher(
        "Open MPI mpiexec",
        "openmpi",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        read_open_mpi,
    ),
    Launcher("MPICH mpiexec", "mpich", ("PMI_RANK", "PMI_SIZE"), read_mpich),
    Launcher(
        "Slurm srun",
        "slurm",
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_ID"),
        read_slurm,
    ),
    Launcher(
        "plain variables", "env", ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), read_plain
    ),
)


def _derived(
    environ: Environment,
    launcher: str,
    variables: tuple[str, str],
    job: str,
    hosts: Sequence[str],
    seed: str,
) -> Assignment:
    """Return an assignment with a derived address, unless the user has set one.

    ``variables`` name the rank and the world size. ``hosts`` may run rank 0, the likeliest first.
    ``seed`` identifies the job, or is empty.
    """
    rank, world_size = (read_integer(environ, name) for name in variables)
    if environ.get(ADDRESS):
        advice = f"the address is that of {ADDRESS}"
        return Assignment(rank, world_size, environ[ADDRESS], job, launcher, advice=advice)
    product = launcher.removesuffix(" mpiexec").removesuffix(" srun")
    if not hosts or not (seed or environ.get(PORT)):
        raise ConfigurationError(
            f"{product} does not say on which host rank 0 runs, or at which port: set {ADDRESS}="
            "host:port, the same for all ranks, with the host of rank 0 as the others reach it and"
            " any free port above 1023"
        )
    port = environ.get(PORT) or str(_FIRST_PORT + zlib.crc32(seed.encode()) % _PORTS)
    advice = (
        f"the address was derived from the variables of {product}; if rank 0 runs elsewhere or"
        f" the port is taken, set {ADDRESS}=host:port or {PORT}, the same for all ranks"
    )
    address, *others = (_join(host, port) for host in hosts)
    return Assignment(rank, world_size, address, job, launcher, advice=advice, others=tuple(others))


def _hosts_of_allocation(environ: Environment) -> list[str]:
    if nodes := environ.get("SLURM_JOB_NODELIST"):
        return list(islice(expand_nodes(nodes), _MOST_HOSTS))
    return environ.get("LSB_MCPU_HOSTS", "").split()[::2]  # "host1 8 host2 8"


def _join(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def read_integer(environ: Environment, name: str) -> int:
    """Return a variable as an integer, or raise ConfigurationError."""
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigurationError(f"{name} is {environ[name]!r}, not an integer") from None


def expand_nodes(text: str) -> Iterator[str]:
    """Yield the names in a list such as ``gpu[01-03,7],login``, or raise ConfigurationError."""
    names = [found[0] for found in _NAME.finditer(text)]
    if not names or ",".join(names) != text:
        raise _not_a_list(text)
    for name in names:
        yield from _expand(name, text)


def expand_nodes_of_open_mpi(text: str) -> list[str]:
    """Return the host names in one of Open MPI's lists, such as ``gpu[2:1-3,7],login@0(5)``.

    The number before the colon is the width of the others. Raises ConfigurationError.
    """
    names = text.partition("@")[0]

    def as_slurm(found: re.Match[str]) -> str:
        digits = int(found[1])
        return re.sub(r"\d+", lambda number: number[0].zfill(digits), f"[{found[2]}]")

    return list(expand_nodes(_DIGITS.sub(as_slurm, names)))


def _expand(name: str, text: str) -> Iterator[str]:
    found = _BRACKETS.search(name)
    if found is None:
        yield name
        return
    before, after = name[: found.start()], name[found.end() :]
    for number in _numbers(found[1], text):
        for rest in _expand(after, text) if after else ("",):
            yield before + number + rest


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise _not_a_list(text)
        # Keep leading zeros: gpu[08-10] begins with gpu08.
        width = len(match[1])
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield f"{number:0{width}d}"


def _not_a_list(text: str) -> ConfigurationError:
    return ConfigurationError(f"{text!r} is not a list of nodes such as gpu[01-03,7],login")
