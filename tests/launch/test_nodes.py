"""Several launchers, as on several hosts: here on loopback, each with a node rank of its own."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from children import Child
from launched import COMMAND, PREAMBLE, Launched, is_running
from rankwire.launch.certificates import make_certificates
from worlds import free_port

HOSTS = ("10.213.77.1", "10.213.77.2")
RESTART = ("--on-failure", "restart")
CONNECT = """
import rankwire
backend = rankwire.connect()
"""


class Hosts:
    """The launchers of one job."""

    def __init__(self, folder: Path) -> None:
        self.secret = folder / "job.secret"
        self.secret.touch(mode=0o600)
        self.secret.write_text(secrets.token_hex(32))
        self.script = folder / "script.py"
        self.master = f"127.0.0.1:{free_port()}"
        self.networks: list[str] = []
        self.launchers: list[Launched] = []

    def write(self, body: str) -> None:
        self.script.write_text(PREAMBLE + body)

    def command(self, node: int, *options: str, ranks: int = 2, nodes: int = 2) -> list[str]:
        return [
            *COMMAND, "-n", str(ranks), "--nnodes", str(nodes), "--node-rank", str(node),
            "--master", self.master, "--secret-file", str(self.secret), *options, str(self.script),
        ]  # fmt: skip

    def launch(self, node: int, *options: str, ranks: int = 2, nodes: int = 2) -> Launched:
        prefix = ["ip", "netns", "exec", self.networks[node]] if self.networks else []
        launched = Launched(prefix + self.command(node, *options, ranks=ranks, nodes=nodes))
        self.launchers.append(launched)
        return launched

    def start(self, body: str, *options: str, ranks: tuple[int, ...] = (2, 2), ready: bool = True):
        """Start a script on all hosts, and go on when every rank is ready."""
        self.write(body)
        launched = [
            self.launch(node, *options, ranks=count, nodes=len(ranks))
            for node, count in enumerate(ranks)
        ]
        for host, count in zip(launched, ranks, strict=True):
            if ready:
                host.read_pids(count)
        return launched


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    monkeypatch.delenv("RANKWIRE_SECRET_FILE", raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    made = Hosts(tmp_path)
    yield made
    for launched in made.launchers:
        launched.close()
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def two_networks():
    """Two network namespaces with a cable between them, as two hosts: their names."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip")
    tag = secrets.token_hex(3)
    names = [f"rw{tag}{end}" for end in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    with contextlib.ExitStack() as stack:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth",
           "peer", "name", names[1], "netns", names[1])  # fmt: skip
        for name, host in zip(names, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")
        yield names


def wait_all(launched: list[Launched], timeout: float = 20.0) -> list[tuple[int, str, str]]:
    """Wait for all of them at once, so that none is held up by its full output."""
    results: dict[int, tuple[int, str, str]] = {}

    def wait(index: int) -> None:
        results[index] = launched[index].wait(timeout)

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(len(launched))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[i] for i in range(len(launched))]


def test_one_world_with_ranks_numbered_by_node(hosts):
    body = (
        CONNECT + "print(rank, rankwire.all_gather_object(backend, os.getppid())); backend.close()"
    )
    results = wait_all(hosts.start(body, "--no-prefix", ranks=(1, 3, 2), ready=False))
    assert [code for code, _, _ in results] == [0, 0, 0], results
    lines = [sorted(stdout.splitlines()) for _, stdout, _ in results]
    assert [[int(line.split()[0]) for line in host] for host in lines] == [[0], [1, 2, 3], [4, 5]]
    assert len({line.partition(" ")[2] for host in lines for line in host}) == 1


def test_hosts_with_programs_of_their_own_share_roles(hosts):
    """Ranks of a role are counted through; a restarted one has its own program on its host."""
    hosts.write(
        """
import rankwire
with rankwire.connect() as backend, rankwire.RpcAgent(backend, serve={"pid": os.getpid}) as agent:
    if rank > 0:
        agent.serve()
    else:
        for rank, name in enumerate(["trainer/0", "rollout/0", "rollout/1", "rollout/2"]):
            assert backend.roles.name_of(rank) == name
        before = agent.to("rollout/2").pid()
        if "restart" in sys.argv:
            os.kill(before, signal.SIGKILL)
            while backend.failure_of(3) is None:
                time.sleep(0.01)
            backend.wait_for("rollout/2")
            assert agent.to("rollout/2").pid() != before
        print(dict(backend.roles))
        agent.stop("rollout")
"""
    )
    script = str(hosts.script)
    first = hosts.command(0, "--name", "trainer", "--on-failure", "restart", ranks=1)
    first += ["restart", ":", "-n", "1", "--name", "rollout", script]
    second = hosts.command(1, "--name", "rollout", ranks=2)
    hosts.launchers += [Launched(first), Launched(second)]
    (code, stdout, stderr), other = wait_all(hosts.launchers, 40.0)
    assert (code, other[0]) == (0, 0), (stderr, other)
    assert stdout == "[rank 0 trainer/0] {'trainer': (0,), 'rollout': (1, 2, 3)}\n"
    assert "rank 3 (rollout/2) failed (killed by SIGKILL" in stderr
    assert "on node 1" in stderr


@pytest.mark.slow
def test_launchers_in_any_order_and_a_wrong_node_count(hosts):
    hosts.write(CONNECT + "print('sum', backend.world_size); backend.close()")
    late = hosts.launch(1)
    stranger = subprocess.run(
        hosts.command(2, nodes=2), capture_output=True, text=True, timeout=20, check=False
    )
    assert stranger.returncode == 2
    assert "no node 2 of 2" in stranger.stderr
    first = hosts.launch(0)
    results = wait_all([first, late])
    assert [(code, out.count("sum 4")) for code, out, _ in results] == [(0, 2), (0, 2)]


def test_every_launcher_exits_with_the_code_of_the_first_failure(hosts):
    launched = hosts.start(
        "ready()\nmeet(4)\nif rank == 3: print('why', file=sys.stderr); sys.exit(7)\ntime.sleep(60)"
    )
    (code, _, summary), (other_code, _, other_summary) = wait_all(launched)
    assert (code, other_code) == (7, 7)
    assert "rank 3 failed first: exit code 7, on node 1" in summary
    assert "    why\n" in summary
    assert "stopped: ranks 0, 1, 2" in summary
    assert "rank 3 failed first" in other_summary
    for host in launched:
        host.wait_until_all_gone(0)


# More than a pipe holds, and less than the launcher keeps before its ranks have to wait.
TALK = "for i in range(4000): print('line', i, 'x' * 60)\n"


@pytest.mark.parametrize("talker", [0, 1])
def test_a_reader_that_is_away_misses_no_line_though_another_node_has_left(hosts, talker):
    launched = hosts.start(f"if rank == {talker}:\n    {TALK}", ranks=(1, 1), ready=False)
    assert launched[1 - talker].wait()[0] == 0
    time.sleep(1.5)  # the reader is away
    code, stdout, stderr = launched[talker].wait()
    assert (code, stderr) == (0, "")
    assert [int(line.split()[-2]) for line in stdout.splitlines()] == list(range(4000))


def test_unread_lines_are_counted_when_the_job_is_asked_to_end(hosts):
    body = f"{TALK}print('all said', file=sys.stderr)\nsignal.pause()"
    launched = hosts.start(body, ranks=(1, 1), ready=False)
    for host in launched:
        assert "all said" in host.process.stderr.readline()
    launched[0].send(signal.SIGTERM)
    for rank, host in enumerate(launched):
        assert host.process.wait(15) == 143
        stdout, stderr = host.process.stdout.read(), host.process.stderr.read()
        lost = re.search(rf"not written: (\d+) lines of rank {rank}\n", stderr)
        assert lost is not None, stderr
        assert int(lost[1]) + stdout.count("\n") == 4000


def test_the_reader_of_another_nodes_output_leaves(hosts):
    launched = hosts.start(
        "ready()\nwhile True: print('x' * 1000); time.sleep(0.001)", "--grace", "1", ranks=(1, 1)
    )
    launched[1].process.stdout.close()
    launched[1].process.stdout = None
    results = wait_all(launched)
    assert [code for code, _, _ in results] == [128 + signal.SIGPIPE] * 2, results[1][2]
    for _, _, stderr in results:
        assert "stdout of node 1 cannot be written to any more (Broken pipe)" in stderr


@pytest.mark.fault(54, "a launcher that dies leaves no rank on any host, within 10 s")
@pytest.mark.parametrize("victim", [0, 1])
def test_row_54_a_killed_launcher_ends_the_job_on_all_hosts(hosts, victim):
    launched = hosts.start("ready()\ntime.sleep(60)", "--grace", "1")
    launched[victim].process.kill()
    code, _, stderr = launched[1 - victim].wait(10)
    assert code == 1
    assert f"the launcher of node {victim}" in stderr
    assert "is gone" in stderr
    assert "rank 1 is lost" not in stderr  # the node is
    for host in launched:
        host.wait_until_all_gone(10)


@pytest.mark.parametrize("node", [0, 1])
def test_ctrl_c_on_any_host_stops_all_once(hosts, node):
    launched = hosts.start(
        """
def handle(*_):
    print("interrupted", flush=True)
    time.sleep(0.2)
    sys.exit(0)
signal.signal(signal.SIGINT, handle)
ready()
time.sleep(60)
"""
    )
    launched[node].send(signal.SIGINT)
    results = wait_all(launched)
    assert [code for code, _, _ in results] == [130, 130], results
    assert [out.count("interrupted") for _, out, _ in results] == [2, 2]


@pytest.mark.parametrize("node", [0, 1])
def test_a_second_ctrl_c_on_one_host_kills_on_all(hosts, node):
    launched = hosts.start(
        """
signal.signal(signal.SIGINT, signal.SIG_IGN)
ready()
time.sleep(60)
""",
        "--grace",
        "40",
    )
    launched[node].send(signal.SIGINT)
    assert launched[0].process.stderr is not None
    first = launched[0].process.stderr.readline()
    where = " on node 1" if node else ""
    assert first == (
        f"rankwire: SIGINT{where}: stopping ranks 0, 1, 2, 3; Ctrl-C again kills them\n"
    )
    time.sleep(0.6)  # sooner it would be an echo of the first
    launched[node].send(signal.SIGINT)
    results = wait_all(launched)
    assert [code for code, _, _ in results] == [130, 130], results
    assert results[0][2].endswith("rankwire: killed: ranks 0, 1, 2, 3\n")


def test_a_host_names_the_signal_on_another_host_that_stopped_its_ranks(hosts):
    launched = hosts.start("ready(); time.sleep(60)")
    launched[0].send(signal.SIGTERM)
    results = wait_all(launched)
    assert [code for code, _, _ in results] == [143, 143], results
    assert results[1][2] == "rankwire: SIGTERM: the job was stopped\n"


def test_a_scheduler_that_signals_all_hosts_at_once_asks_once(hosts):
    launched = hosts.start(
        """
def handle(*_):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, handle)
ready()
time.sleep(60)
"""
    )
    for host in launched:
        host.send(signal.SIGTERM)
    results = wait_all(launched)
    assert [(code, out.count("saved")) for code, out, _ in results] == [(143, 2)] * 2, results


@pytest.mark.slow
def test_all_hosts_restart_after_a_failure(hosts):
    launched = hosts.start(
        CONNECT
        + """
attempt = int(os.environ["RANKWIRE_RESTART_COUNT"])
with backend:
    backend.barrier()
    if attempt < 2 and rank == 2:
        raise ValueError("not yet")
    print("done in attempt", attempt, rankwire.all_gather_object(backend, attempt))
""",
        "--restarts", "2",
        ready=False,
    )  # fmt: skip
    results = wait_all(launched, 40)
    assert [code for code, _, _ in results] == [0, 0], results
    assert [out.count("done in attempt 2 [2, 2, 2, 2]") for _, out, _ in results] == [2, 2]
    assert "restart 1 of 2" in results[0][2]
    assert "restart 2 of 2" in results[0][2]
    said = [line for line in results[1][2].splitlines() if line.startswith("rankwire: ")]
    assert said == [f"rankwire: starting the ranks here again, restart {n}" for n in (1, 2)]


def launch_impatient(hosts, node):
    """Start the launcher of one of three nodes, which says at once what it waits for."""
    hosts.write("pass")
    program = (
        "import rankwire.launch.output as output, rankwire.cli\n"
        "output.REMIND_AFTER = output.REMIND_EVERY = 0.1\n"
        "rankwire.cli.main()"
    )
    command = hosts.command(node, ranks=1, nodes=3)
    assert command[: len(COMMAND)] == COMMAND
    launched = Launched([sys.executable, "-c", program, *command[len(COMMAND) - 1 :]])
    hosts.launchers.append(launched)
    return launched


def first_with(launched, words):
    assert launched.process.stderr is not None
    return next(line for line in launched.process.stderr if words in line)


@pytest.mark.slow
def test_a_launcher_that_waits_for_others_says_so_without_a_terminal(hosts):
    """Each waits for the one before it: node 0 for node 2, node 1 for node 0 to start."""
    follower = launch_impatient(hosts, 1)
    assert f"node 0 at {hosts.master}" in first_with(follower, "looking for the launcher of")
    conductor = launch_impatient(hosts, 0)
    assert first_with(follower, "waiting for node 0 to start the ranks")
    assert f"node 2 at {hosts.master}" in first_with(
        conductor, "waiting for the launcher of node 2"
    )
    launch_impatient(hosts, 2)
    assert [launched.wait()[0] for launched in hosts.launchers] == [0, 0, 0]


def test_a_launcher_that_waits_for_others_says_where_the_job_was_stopped(hosts):
    conductor, follower = launch_impatient(hosts, 0), launch_impatient(hosts, 1)
    assert first_with(follower, "waiting for node 0 to start the ranks")
    follower.send(signal.SIGINT)
    results = wait_all([conductor, follower])
    assert [code for code, _, _ in results] == [130, 130], results
    assert "rankwire: SIGINT on node 1: the job ends before it began\n" in results[0][2]


def test_another_secret_is_refused(hosts, tmp_path):
    hosts.write("ready()\ntime.sleep(60)")
    hosts.launch(0)
    hosts.secret = tmp_path / "other.secret"
    hosts.secret.touch(mode=0o600)
    hosts.secret.write_text(secrets.token_hex(32))
    code, _, stderr = hosts.launch(1).wait()
    assert code == 2
    assert "refused node 1" in stderr
    assert "secrets differ" in stderr


@pytest.mark.fault(57, "who finds a stranger at the rendezvous port is told so within 5 s")
def test_row_57_a_foreign_process_listens_at_the_port(hosts):
    hosts.write("ready()")
    host, port = hosts.master.split(":")
    listening = threading.Event()

    def answer() -> None:
        with socket.create_server((host, int(port))) as server:
            listening.set()
            server.settimeout(10)
            with contextlib.suppress(OSError):
                peer, _ = server.accept()
                with peer:
                    peer.recv(128)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n".ljust(64))
                    peer.recv(1)

    thread = threading.Thread(target=answer)
    thread.start()
    listening.wait(5)
    code, _, stderr = hosts.launch(1).wait()
    thread.join()
    assert code == 2
    assert "another program listens at this address" in stderr


@pytest.mark.fault(57, "a port that is taken is named before anything starts")
def test_row_57_the_port_is_taken(hosts):
    hosts.write("ready()")
    host, port = hosts.master.split(":")
    with socket.create_server((host, int(port))):
        code, stdout, stderr = hosts.launch(0).wait()
    assert (code, stdout) == (2, "")
    assert f"cannot listen on {hosts.master}: Address already in use" in stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--master": None}, "need --master host:port"),
        ({"--master": "0.0.0.0:5000"}, "name the host"),
        ({"--master": "127.0.0.1:0"}, "choose a port"),
        ({"--master": "no-such-host.invalid:29400"}, "cannot resolve 'no-such-host.invalid'"),
        ({"--secret-file": None}, "head -c 32 /dev/urandom"),
    ],
)
def test_what_several_hosts_need(hosts, change, words):
    hosts.write("pass")
    command = hosts.command(0)
    for option, value in change.items():
        index = command.index(option)
        command[index : index + 2] = [] if value is None else [option, value]
    done = Child(command).result(20)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr


def test_a_secret_file_that_others_can_read_or_that_is_short(hosts):
    hosts.write("pass")
    hosts.secret.chmod(0o644)
    code, _, stderr = hosts.launch(0).wait()
    assert (code, "mode 0600" in stderr) == (2, True)
    hosts.secret.chmod(0o600)
    hosts.secret.write_text("short")
    code, _, stderr = hosts.launch(0).wait()
    assert (code, "at least 16" in stderr) == (2, True)


def test_a_launcher_that_waits_for_the_others_can_be_stopped(hosts):
    hosts.write("pass")
    for node in (0, 1):
        launched = hosts.launch(node)
        end = time.monotonic() + 10
        # Asked for its handlers, not for a time: they are there when SIGINT is caught.
        while not _catches(launched.process.pid, signal.SIGINT):
            assert time.monotonic() < end
            time.sleep(0.02)
        launched.send(signal.SIGINT)
        assert launched.wait()[0] == 130


def _catches(pid: int, number: int) -> bool:
    """Whether the process has its own wakeup for a signal: a launcher has a reaper by then."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any(is_running(int(child)) for child in children)


# -- in network namespaces -----------------------------------------------------------------------


@pytest.mark.parametrize("security", ["auth", pytest.param("tls", marks=pytest.mark.slow)])
def test_a_world_across_two_networks(hosts, two_networks, request, security):
    hosts.networks, hosts.master = two_networks, f"{HOSTS[0]}:29400"
    body = CONNECT + (
        "other = (rank + 2) % 4\nprint(backend.link_to(other).transport,"
        " backend.security, rankwire.all_gather_object(backend, rank))\n"
        "backend.barrier()\nbackend.close()"
    )
    tls = ["--tls", str(request.getfixturevalue("tls_dir"))] if security == "tls" else []
    results = wait_all(hosts.start(body, "--no-prefix", *tls, ready=False))
    printed = f"tcp {security} [0, 1, 2, 3]\n" * 2
    assert [(code, out) for code, out, _ in results] == [(0, printed)] * 2, results


@pytest.mark.fault(54, "a host that is cut off ends the job on all hosts, within 10 s")
def test_row_54_a_cable_that_is_cut(hosts, two_networks, measured):
    hosts.networks, hosts.master = two_networks, f"{HOSTS[0]}:29400"
    launched = hosts.start("ready()\ntime.sleep(60)", "--grace", "1")
    subprocess.run(
        ["ip", "-n", two_networks[1], "link", "set", two_networks[1], "down"], check=True
    )
    begin = time.monotonic()
    results = wait_all(launched, 40.0)
    measured("a host that is cut off: the job has ended", time.monotonic() - begin, limit=10.0)
    assert [code for code, _, _ in results] == [1, 1], results
    assert "the launcher of node 1" in results[0][2]
    assert "the launcher of node 0 is gone" in results[1][2]
    for host in launched:
        host.wait_until_all_gone(0)


# -- inside TLS


@pytest.fixture
def tls_dir(tmp_path):
    pytest.importorskip("cryptography")
    make_certificates(tmp_path / "tls", 4)
    return tmp_path / "tls"


def test_launchers_and_ranks_inside_tls_each_with_its_own_files(hosts, tls_dir, tmp_path):
    hosts.write(
        """
import rankwire
with rankwire.connect(transport="tcp") as backend:  # else they would use Unix sockets here
    print(rank, backend.security, sum(rankwire.all_gather_object(backend, rank)))
"""
    )
    folders = [tmp_path / f"host{node}" for node in range(2)]
    for node, folder in enumerate(folders):
        folder.mkdir(mode=0o700)
        owners = ("launcher", f"rank-{2 * node}", f"rank-{2 * node + 1}")
        files = [f"{owner}.{kind}" for owner in owners for kind in ("pem", "key")]
        for name in ("ca.pem", *files):
            shutil.copy(tls_dir / name, folder / name)
    launched = [hosts.launch(node, "--no-prefix", "--tls", str(folders[node])) for node in (1, 0)]
    results = wait_all(launched[::-1])
    assert [code for code, _, _ in results] == [0, 0], results
    printed = [sorted(stdout.splitlines()) for _, stdout, _ in results]
    assert printed == [["0 tls 6", "1 tls 6"], ["2 tls 6", "3 tls 6"]]


@pytest.mark.parametrize(
    ("has_tls", "words"),
    [(True, ["refused node 1", "certificate"]), (False, ["wants TLS", "--tls"])],
)
def test_a_launcher_with_certificates_of_another_job_or_none_is_refused(
    hosts, tls_dir, tmp_path, has_tls, words
):
    hosts.write("ready()\ntime.sleep(60)")
    hosts.launch(0, "--tls", str(tls_dir))
    make_certificates(tmp_path / "other", 4)
    code, _, stderr = hosts.launch(1, *["--tls", str(tmp_path / "other")][: 2 * has_tls]).wait()
    assert code == 2
    assert all(word in stderr for word in words)


def test_the_environment_may_name_the_folder_on_several_hosts(hosts, tmp_path, monkeypatch):
    hosts.write("ready()")
    monkeypatch.setenv("RANKWIRE_TLS_DIR", str(tmp_path / "nowhere"))
    code, _, stderr = hosts.launch(1).wait()
    assert code == 2
    assert f"{tmp_path / 'nowhere'} has no ca.pem" in stderr


def test_a_host_without_the_files_of_its_ranks_ends_the_job(hosts, tls_dir, tmp_path):
    """Which ranks a host has is known only when all launchers have come."""
    hosts.write("ready()\ntime.sleep(60)")
    shutil.copytree(tls_dir, tmp_path / "less")
    (tmp_path / "less" / "rank-3.key").unlink()
    first = hosts.launch(0, "--tls", str(tls_dir), "--grace", "1")
    second = hosts.launch(1, "--tls", str(tmp_path / "less"))
    (code, _, stderr), (other_code, stdout, other_stderr) = wait_all([first, second])
    assert (code, other_code) == (1, 2)
    assert "the launcher of node 1 cannot start" in stderr
    assert "no rank-3.key" in stderr
    assert "no rank-3.key" in other_stderr
    assert stdout == ""


def test_a_rank_of_another_host_is_restarted_there(hosts):
    launched = hosts.start(
        """
import threading
import rankwire
ready()
back = threading.Event()
with rankwire.connect(timeout=30.0) as backend:
    backend.on_peer_joined(lambda *joined: back.set())
    if rank == 3 and backend.incarnation == 0:
        backend.send(b"pid", 0)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        backend.recv(3)
        assert back.wait(30.0)
        backend.send(b"hello again", 3)
    elif rank == 3:
        print("got", bytes(backend.recv(0)).decode(), flush=True)
""",
        *RESTART,
    )
    ends = [host.wait(60.0) for host in launched]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "[rank 3] got hello again" in ends[1][1]
    assert "rank 3 failed (killed by SIGKILL" in ends[0][2]
    assert ", on node 1" in ends[0][2]


def test_all_ranks_of_another_host_are_restarted_and_the_last_failure_ends_all(hosts):
    launched = hosts.start(
        """
import rankwire
ready()
if rank >= 2:
    sys.exit(5)
time.sleep(60)
""",
        *RESTART,
        *("--max-restarts", "1"),
    )
    ends = [host.wait(60.0) for host in launched]
    assert [code for code, _, _ in ends] == [5, 5], ends
    assert ends[1][1].count("pid") == 2, ends[1]  # two were read when they started at first
    assert "restart 1 of 1" in ends[0][2]
