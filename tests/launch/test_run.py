"""rankwire run, from outside: real processes, real signals."""

import hashlib
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launched import COMMAND, PATIENT_COMMAND
from rankwire.errors import ConfigurationError, InvalidWorldSizeError
from rankwire.launch import run as run_module
from rankwire.launch.run import run as run_ranks
from rankwire.launch.run_options import Program, RunOptions

SLEEP = "\nready()\ntime.sleep(60)\n"
IGNORE = "\nfor number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
HAS_CHILD = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("pid", child.pid)
"""


def captured(command: list[str], **where) -> subprocess.CompletedProcess[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, **streams | where, text=True, timeout=30, check=False)


# -- starting ------------------------------------------------------------------------------------


def test_each_line_begins_with_its_rank(run):
    done = run("print('one'); print('two'); sys.stderr.write('three, not ended')", ranks=3)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[rank {rank}] {word}" for rank in range(3) for word in ("one", "two")
    )
    assert sorted(done.stderr.splitlines()) == [
        f"[rank {rank}] three, not ended" for rank in range(3)
    ]


def test_all_arguments_after_the_script_go_to_the_script(run):
    options = ("-n", "7", "--help", "--", "--prefix")
    done = run("print(sys.argv[1:])", "--no-prefix", "--", ranks=1, args=options)
    assert done.stdout == f"{list(options)}\n"


def test_run_starts_a_module(tmp_path):
    (tmp_path / "mine.py").write_text("import sys; print(__name__, sys.argv[1:])")
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = captured([*COMMAND, "-n", "1", "-m", "mine", "--lr", "3"], env=environ)
    assert done.stdout == "[rank 0] __main__ ['--lr', '3']\n"


def test_a_rank_gets_its_settings_from_the_environment(run):
    done = run(
        """
import socket, hashlib
from rankwire.rendezvous.secret import ask_for_secret
secret = ask_for_secret(int(os.environ["RANKWIRE_SECRET_FD"]), named="fd")
seen = b"".join(open(f"/proc/{pid}/{name}", "rb").read()
                for pid in ("self", os.getppid()) for name in ("environ", "cmdline"))
assert secret not in seen and secret.hex().encode() not in seen
assert os.environ["RANKWIRE_COORDINATOR"] == "launcher"
assert os.environ["RANKWIRE_RESTART_COUNT"] == "0"
host, port = os.environ["RANKWIRE_ADDRESS"].split(":")
socket.create_connection((host, int(port))).close()  # the launcher listens already
assert "RANKWIRE_SECRET" not in os.environ and "RANKWIRE_SECRET_FILE" not in os.environ
assert sys.stdin.read() == ""
names = [name for name in os.listdir("/proc/self/fd")]
print(len(secret), os.environ["RANKWIRE_WORLD_SIZE"], os.environ["RANKWIRE_JOB"],
      os.environ["OMP_NUM_THREADS"], hashlib.sha256(secret).hexdigest(), rank)
""",
        "--no-prefix",
        ranks=3,
        env=os.environ
        | {"RANKWIRE_SECRET": "x" * 20, "RANKWIRE_SECRET_FILE": "/no", "OMP_NUM_THREADS": "5"},
    )
    assert done.returncode == 0, done.stderr
    told = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert sorted(rank for _, _, rank in told) == ["0", "1", "2"]
    assert len({common for common, _, _ in told}) == 1
    length, world_size, job, threads = told[0][0].split()
    assert (length, world_size, threads) == ("32", "3", "5")
    assert job.startswith("run-")
    digests = {digest for _, digest, _ in told}
    assert len(digests) == 3, "each rank has a key of its own, and not the job's secret"
    assert hashlib.sha256(b"").hexdigest() not in digests


def test_a_rank_inherits_nothing_else(run):
    done = run("print(rank, *sorted(map(int, os.listdir('/proc/self/fd'))))", "--no-prefix")
    # stdin, stdout, stderr, the secret, the leash, and the directory itself
    assert [len(line.split()) - 1 for line in done.stdout.splitlines()] == [6, 6]


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_world_without_ranks_is_refused(ranks):
    with pytest.raises(InvalidWorldSizeError):
        run_ranks(RunOptions([Program(["x.py"], ranks)]))


def test_impossible_settings_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError):
        run_ranks(RunOptions([Program(["x.py"], 1)], grace=float("nan")))
    with pytest.raises(ConfigurationError, match="file"):
        run_ranks(RunOptions([Program(["x.py"], 1)], log_dir=tmp_path / "file"))


CONNECT = """
import rankwire
with rankwire.connect() as backend:
    print(backend.link_to(1 - rank).transport, os.environ.get("RANKWIRE_RUNTIME_DIR"))
    backend.barrier()
"""


def test_a_missing_runtime_directory_is_logged_once_and_the_world_forms(run, tmp_path):
    gone = str(tmp_path / "gone")
    environ = os.environ | {"XDG_RUNTIME_DIR": gone}
    done = run(CONNECT, "--no-prefix", env=environ)
    (folder,) = {line.removeprefix("unix ") for line in done.stdout.splitlines()}
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert f"rankwire: XDG_RUNTIME_DIR={gone}: No such file or directory; {folder}" in done.stderr


def test_without_any_safe_folder_the_launcher_makes_one_for_the_job(tmp_path, monkeypatch, capfd):
    def refuse():
        raise ConfigurationError("somebody has taken them all")

    monkeypatch.setattr(run_module, "find_runtime_folder", refuse)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    (tmp_path / "x.py").write_text(f"import os\nrank = int(os.environ['RANKWIRE_RANK']){CONNECT}")
    assert run_ranks(RunOptions([Program([str(tmp_path / "x.py")], 2)], has_prefix=False)) == 0
    stdout, stderr = capfd.readouterr()
    (folder,) = {line.removeprefix("unix ") for line in stdout.splitlines()}
    assert f"somebody has taken them all; {folder} is used instead" in stderr
    assert not os.path.exists(folder)
    assert "RANKWIRE_RUNTIME_DIR" not in os.environ


def test_a_script_whose_name_begins_with_a_dash(tmp_path):
    (tmp_path / "-plain.py").write_text("import sys; print(sys.argv)")
    done = captured([*COMMAND, "-n", "1", "--", "-plain.py", "-x"], cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[rank 0] ['-plain.py', '-x']\n", "")


def test_too_few_descriptors_are_reported_in_one_line(script):
    command = [*COMMAND, "-n", "4", script("print(1)")]
    done = captured(["sh", "-c", 'ulimit -n 12; exec "$@"', "sh", *command])
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"rankwire: 4 ranks need \d+ open files in the launcher, and the limit is 12:"
        r" raise it, for example with `ulimit -n 1024`\n",
        done.stderr,
    )


def in_a_network_of_its_own(setup: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this process may not make namespaces")
    return captured(["unshare", "--net", "sh", "-ec", f'{setup}; exec "$@"', "sh", *command])


def test_a_host_with_the_other_loopback_address_only(script):
    command = [*COMMAND, "-n", "2", script(CONNECT)]
    setup = "ip link set lo up; ip addr del 127.0.0.1/8 dev lo"
    done = in_a_network_of_its_own(setup, command)
    assert (done.returncode, done.stdout.count("unix"), done.stderr) == (0, 2, "")


def test_a_host_whose_loopback_is_down_gets_an_error_at_once(script):
    command = [*COMMAND, "-n", "2", script(CONNECT)]
    done = in_a_network_of_its_own("true", command)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "127.0.0.1: Network is unreachable" in done.stderr
    assert "`ip link set lo up`" in done.stderr


# -- failing -------------------------------------------------------------------------------------


def test_the_first_failure_stops_all_and_is_explained(start):
    launched = start(
        """
signal.signal(signal.SIGTERM, lambda *_: (print("asked to stop"), sys.exit(0)))
ready()
meet(4)
if rank == 2:
    raise ValueError("the reason")
time.sleep(60)
""",
        ranks=4,
    )
    code, stdout, stderr = launched.wait()
    assert code == 1
    assert sorted(stdout.splitlines()) == [f"[rank {rank}] asked to stop" for rank in (0, 1, 3)]
    assert stderr.startswith("[rank 2] Traceback (most recent call last):\n")
    assert stderr.endswith(
        "[rank 2] ValueError: the reason\n"
        "rankwire: rank 2 failed first: exit code 1\n"
        "rankwire: stopped: ranks 0, 1, 3\n"
    )
    launched.wait_until_all_gone(0)


def test_the_exit_code_is_the_failing_ranks(run):
    done = run("if rank == 1: print('why', file=sys.stderr); sys.exit(7)\ntime.sleep(60)")
    assert done.returncode == 7
    assert "[rank 1] why\nrankwire: rank 1 failed first: exit code 7\n" in done.stderr


def test_output_of_the_failed_rank_is_repeated_if_many_lines_followed(run):
    done = run(
        """
meet(2)
if rank == 1:
    print('why', file=sys.stderr, flush=True)
    sys.exit(7)
time.sleep(0.5)
print("line\\n" * 100, end="", file=sys.stderr, flush=True)
time.sleep(60)
""",
        launcher=PATIENT_COMMAND,
    )
    assert done.stderr.startswith("[rank 1] why\n")
    assert (
        "rankwire: rank 1 failed first: exit code 7\n"
        "rankwire: the last lines of its stderr:\n"
        "    why\n"
    ) in done.stderr


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", 139, "killed by SIGSEGV"),
    ],
)
def test_death_by_a_signal_is_named(run, body, code, words):
    done = run(f"if rank == 1: {body}\ntime.sleep(60)")
    assert done.returncode == code
    assert f"rank 1 failed first: {words}" in done.stderr
    if code == 139:  # also a crash in native code shows where it was
        assert "[rank 1] Fatal Python error: Segmentation fault\n" in done.stderr


def test_the_death_of_rank_0_is_an_ordinary_one(run):
    done = run(
        """
import rankwire
backend = rankwire.connect()
backend.barrier()
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    backend.recv(0)
except rankwire.PeerLostError as error:
    rest = rankwire.SubBackend(backend, [1, 2])
    rest.barrier()  # the others go on
    print("lost", error.peer, rest.rank, flush=True)
time.sleep(60)
""",
        ranks=3,
        launcher=PATIENT_COMMAND,
    )
    assert done.returncode == 137
    assert "rank 0 failed first: killed by SIGKILL" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 1] lost 0 0", "[rank 2] lost 0 1"]


def test_a_rank_that_is_given_up_for_its_silence_is_named_at_once(run):
    done = run(
        """
import rankwire
backend = rankwire.connect(suspect_after=0.2, fail_after=1.5)
backend.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    backend.recv(1)
finally:
    time.sleep(1.0)
    print("a while later", file=sys.stderr, flush=True)
""",
        *("--grace", "0.5"),
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    given_up = next(i for i, line in enumerate(lines) if "rank 1 was given up: its process" in line)
    assert given_up < lines.index("[rank 0] a while later")
    assert "failed because of rank 1: PeerUnresponsiveError: " in done.stderr
    assert "rankwire: failed because of that: rank 0 (exit code 1)\n" in done.stderr
    assert "failed first" not in done.stderr
    assert "killed: rank 1\n" in done.stderr


def test_a_rank_that_was_given_up_and_is_the_only_one_left_is_named(start):
    launched = start(
        """
import rankwire
backend = rankwire.connect(suspect_after=0.2, fail_after=1.5)
backend.barrier()
ready()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    backend.recv(1)
except rankwire.PeerLostError:
    pass
""",
        *("--grace", "0.3"),
    )
    assert launched.process.stderr is not None
    for line in launched.process.stderr:
        if "only rank 1 is left" in line:
            break
    assert line == (
        "rankwire: only rank 1 is left, which was given up: waiting for its end; Ctrl-C stops it\n"
    )
    launched.send(signal.SIGINT)
    code, _, stderr = launched.wait()
    assert code == 130
    assert "only rank 1 is left" not in stderr


def test_a_rank_that_ends_well_before_it_joins_fails_the_others_at_once(run):
    # The others are about to join when it ends: on a busy machine, the first of them that fails may
    # have the launcher stop one that is still being imported.
    done = run(
        """
ready = __file__ + ".ready"
if rank != 1:
    import rankwire
    open(f"{ready}{rank}", "w").close()
    rankwire.connect()
while not all(os.path.exists(f"{ready}{other}") for other in (0, 2)):
    time.sleep(0.01)
""",
        ranks=3,
    )
    assert done.returncode == 1
    words = "the world cannot form: rank 1 ended (exit code 0) before it joined"
    lines = done.stderr.splitlines()
    assert lines.count(f"rankwire: {words}") == 1
    for rank, other in ((0, 2), (2, 0)):
        own = f"[rank {rank}] failed because of rank 1: RendezvousError: {words}"
        same = f"rankwire: rank {rank} ended with the same error as rank {other}"
        assert any(line.startswith((own, same)) for line in lines)
    assert done.stderr.count("RendezvousError") == 1
    # One of the two may be stopped before it has ended by itself.
    assert any(line.startswith("rankwire: failed because of that: rank ") for line in lines)


def test_the_rank_that_raised_first_is_known_from_the_coordinator(run):
    done = run(
        """
import rankwire
backend = rankwire.connect()
backend.barrier()
try:
    with backend:
        if rank == 1:
            raise KeyError("the reason")
        backend.recv(1)
except rankwire.PeerLostError:
    os._exit(5)  # at once, and without a word
except KeyError:
    sys.stderr.close()
    time.sleep(0.15)  # its process ends later than the other's
    os._exit(6)
"""
    )
    assert done.returncode == 6
    assert "rank 1 failed first: exit code 6" in done.stderr
    assert "    KeyError: 'the reason'\n" in done.stderr


SLOW_TO_END = """
import atexit
if rank == 1:
    atexit.register(time.sleep, {seconds})  # after rankwire has left, which is imported later
import rankwire
backend = rankwire.connect()
backend.barrier()
if rank == 1:
    {fall}
backend.recv(1)
"""


@pytest.mark.parametrize(
    ("fall", "code", "words"),
    [
        ('raise ValueError("the reason")', 1, "exit code 1 (it raised ValueError)"),
        pytest.param("sys.exit(3)", 3, "exit code 3\n", marks=pytest.mark.slow),
    ],
    ids=["by an error", "by a code"],
)
def test_a_rank_that_is_slow_to_end_is_still_blamed(run, fall, code, words):
    done = run(SLOW_TO_END.format(seconds=1.0, fall=fall), ranks=3)
    assert done.returncode == code
    assert f"rank 1 failed first: {words}" in done.stderr
    assert "failed too: ranks 0, 2 (exit code 1)" in done.stderr
    assert "stopped" not in done.stderr


@pytest.mark.slow
def test_the_first_rank_to_fail_is_stopped_and_named_if_it_does_not_end(run):
    fall = "raise ValueError('the reason')"
    done = run(SLOW_TO_END.format(seconds=60, fall=fall), "--grace", "0.5", ranks=3)
    assert done.returncode == 1
    assert "rank 1 failed first: exit code 1 (it raised ValueError)" in done.stderr
    assert "stopped: rank 1\n" in done.stderr


@pytest.mark.slow
def test_a_rank_that_failed_in_an_earlier_world_is_not_blamed_for_what_happens_in_the_next(run):
    done = run(
        """
import contextlib, rankwire
with contextlib.suppress(KeyError, rankwire.PeerLostError), rankwire.connect() as backend:
    if rank == 1:
        raise KeyError("was dealt with")
    backend.recv(1)
backend = rankwire.connect()
backend.barrier()
if rank == 0:
    sys.exit(4)
time.sleep(60)
"""
    )
    assert done.returncode == 4
    assert "rank 0 failed first: exit code 4\n" in done.stderr


def test_a_rank_that_lost_another_is_not_to_blame(run):
    done = run(
        """
import rankwire.errors
meet(2)
if rank == 0:
    raise rankwire.errors.PeerLostError(1, "end of file")
time.sleep(0.5)
raise ValueError("the reason")
""",
        launcher=PATIENT_COMMAND,
    )
    assert "rank 1 failed first: exit code 1" in done.stderr
    assert "failed too: rank 0 (exit code 1)" in done.stderr


def test_a_rank_that_does_not_stop_is_killed(start):
    launched = start(
        IGNORE + "ready()\nmeet(3)\nif rank == 1: sys.exit(3)\ntime.sleep(60)",
        *("--grace", "0.3"),
        ranks=3,
    )
    code, _, stderr = launched.wait()
    assert code == 3
    assert stderr.endswith("rankwire: killed: ranks 0, 2\n")
    launched.wait_until_all_gone(0)


def test_what_ranks_left_running_is_ended(start):
    launched = start(HAS_CHILD + "ready()", pids=4)
    code, _, stderr = launched.wait()
    assert (code, stderr) == (0, "")
    launched.wait_until_all_gone(0)


# A child that has left the session, and one whose parent has ended besides, as a daemon's.
LEAVING = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                         start_new_session=True)
print("pid", child.pid)
orphan = subprocess.run(["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"],
                        stdout=subprocess.PIPE, text=True).stdout
print("pid", orphan)
"""


@pytest.mark.parametrize("ending", ["", "\nos._exit(3)", "\nsignal.pause()"])
def test_what_has_left_its_ranks_session_is_ended_too(start, ending):
    launched = start(LEAVING + "ready()" + ending, ranks=1, pids=3)
    if "pause" in ending:
        launched.send(signal.SIGTERM)
    launched.wait()
    launched.wait_until_all_gone(0)


def test_daemons_that_have_ended_are_collected(start):
    launched = start(
        """
for _ in range(5):
    subprocess.run(["sh", "-c", "setsid true >/dev/null 2>&1 &"])
ready()
time.sleep(60)
""",
        ranks=1,
    )
    pid = launched.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    end = time.monotonic() + 10
    while len(children.read_text().split()) != 2:  # the rank and the reaper
        assert time.monotonic() < end
        time.sleep(0.05)


# -- being stopped -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_once(start, number):
    launched = start(
        f"""
count = 0
def handle(*_):
    global count
    count += 1
signal.signal({int(number)}, handle)
ready()
while not count:
    time.sleep(0.01)
time.sleep(0.1)
print("times", count)
"""
    )
    launched.send(number)
    code, stdout, stderr = launched.wait()
    assert code == 128 + number
    assert sorted(stdout.splitlines()) == ["[rank 0] times 1", "[rank 1] times 1"]
    assert f"{number.name}: stopping ranks 0, 1" in stderr
    launched.wait_until_all_gone(0)


def test_a_hangup_in_plain_python(start):
    launched = start(SLEEP)
    launched.send(signal.SIGHUP)
    code, _, stderr = launched.wait()
    assert code == 129
    assert "failed first" not in stderr
    launched.wait_until_all_gone(0)


def test_a_second_ctrl_c_kills(start):
    launched = start(IGNORE + SLEEP, "--grace", "60")
    launched.send(signal.SIGINT)
    assert "stopping ranks 0, 1" in launched.process.stderr.readline()
    time.sleep(0.6)  # sooner it would be an echo of the first
    launched.send(signal.SIGINT)
    code, _, stderr = launched.wait()
    assert code == 130
    assert "killed: ranks 0, 1" in stderr
    launched.wait_until_all_gone(0)


@pytest.mark.fault(54, "when the launcher is killed its ranks end too")
def test_a_killed_launcher_leaves_no_process(start):
    launched = start(HAS_CHILD + IGNORE + SLEEP, "--grace", "0.3", pids=4)
    launched.process.kill()
    launched.wait_until_all_gone(10)


@pytest.mark.fault(54, "when launcher and reaper are killed together the ranks end too")
def test_a_launcher_that_is_killed_with_its_reaper_leaves_no_process(start):
    launched = start(HAS_CHILD + IGNORE + SLEEP, pids=4)
    pid = launched.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (reaper,) = {int(child) for child in children} - set(launched.pids)
    os.kill(reaper, signal.SIGKILL)
    launched.process.kill()
    launched.wait_until_all_gone(10)


def test_no_process_of_a_job_has_the_secret_of_the_launchers_caller_in_its_environment(
    start, monkeypatch
):
    secret = "a secret of the one who starts the job"
    monkeypatch.setenv("RANKWIRE_SECRET", secret)
    launched = start(SLEEP)
    pid = launched.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 3, "two ranks and the reaper"
    for child in children:
        assert secret.encode() not in Path(f"/proc/{child}/environ").read_bytes()
    launched.send(signal.SIGTERM)
    launched.wait()


def test_a_killed_launcher_leaves_no_process_in_another_session(start):
    launched = start(LEAVING + SLEEP, "--grace", "0.3", ranks=1, pids=3)
    time.sleep(2.0)  # orphans are looked for about once a second
    launched.process.kill()
    launched.wait_until_all_gone(10)


@pytest.mark.slow
def test_the_reader_of_our_output_is_gone(start):
    launched = start("\nready()\nwhile True: print('x' * 1000)", "--grace", "0.5")
    time.sleep(0.3)  # enough to fill every pipe on the way
    launched.send(signal.SIGTERM)
    assert launched.process.wait(15) == 143
    launched.wait_until_all_gone(0)


def test_the_reader_of_our_output_leaves(start):
    launched = start("\nready()\nwhile True: print('x' * 1000); time.sleep(0.001)")
    launched.process.stdout.close()
    launched.process.stdout = None
    assert launched.process.wait(10) == 128 + signal.SIGPIPE
    launched.wait_until_all_gone(0)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("print('x')", 1),
        ("print('x')\ntime.sleep(60)", 1),
        ("if rank: sys.exit(3)\nsignal.signal(15, lambda *_: print('late'))\nsignal.pause()", 3),
    ],
    ids=["ranks that have ended", "ranks that run", "during a failure"],
)
def test_a_full_disk_is_named(script, body, code):
    with open("/dev/full", "wb") as full:
        ranks = str(1 + (code == 3))
        done = captured([*COMMAND, "-n", ranks, script(body)], stdout=full)
    assert done.returncode == code
    assert "stdout cannot be written to any more (No space left on device)" in done.stderr
    assert "not written: 1 line of rank 0" in done.stderr


@pytest.mark.fault(54, "a launcher that dies leaves no rank behind, within 10 s")
def test_row_54_also_after_a_restart(start):
    first_fails = 'if os.environ["RANKWIRE_RESTART_COUNT"] == "0": sys.exit(1)'
    launched = start(first_fails + SLEEP, "--restarts", "1")
    launched.process.kill()
    launched.wait_until_all_gone(10)


# -- starting anew -------------------------------------------------------------------------------


def test_all_ranks_are_restarted_after_a_failure(run, tmp_path):
    done = run(
        """
import rankwire
attempt = int(os.environ["RANKWIRE_RESTART_COUNT"])
with rankwire.connect() as backend:
    backend.barrier()
    print("attempt", attempt, flush=True)
    backend.barrier()
    if attempt < 2:
        if rank == 0: os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    backend.barrier()
""",
        "--restarts", "3", "--log-dir", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt") == 6
    assert "rank 0 failed (killed by SIGKILL" in done.stderr
    assert "restart 2 of 3" in done.stderr
    assert "restart 3" not in done.stderr
    for rank in range(2):
        assert (tmp_path / f"rank_{rank}.log").read_text() == "attempt 0\nattempt 1\nattempt 2\n"


@pytest.mark.slow
def test_a_restart_blames_no_rank_that_failed_because_a_rank_never_joined(run):
    done = run(
        """
import rankwire
if rank == 1 and os.environ["RANKWIRE_RESTART_COUNT"] == "0":
    sys.exit(0)
rankwire.connect().close()
""",
        "--restarts",
        "1",
    )
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if line.startswith("rankwire: ")]
    assert said == [
        "rankwire: the world cannot form: rank 1 ended (exit code 0) before it joined",
        "rankwire: starting all ranks again because of that, restart 1 of 1",
    ]


def test_restarts_are_counted_and_the_last_failure_is_reported(run):
    done = run("sys.exit(3 + int(os.environ['RANKWIRE_RESTART_COUNT']))", "--restarts", "2")
    assert done.returncode == 5
    assert "failed first: exit code 5" in done.stderr


def test_a_job_that_was_stopped_is_not_started_anew(start):
    launched = start(SLEEP, "--restarts", "5")
    launched.send(signal.SIGTERM)
    code, _, stderr = launched.wait()
    assert code == 143
    assert "restart" not in stderr


# -- output --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_lot_of_output_on_both_streams(run):
    done = run(
        """
for i in range(100):
    sys.stdout.write(("o" * 99 + "\\n") * 500)
    sys.stderr.write(("e" * 99 + "\\n") * 500)
""",
        "--no-prefix",
        ranks=4,
    )
    assert done.returncode == 0
    assert done.stdout == ("o" * 99 + "\n") * 200_000
    assert done.stderr == ("e" * 99 + "\n") * 200_000


def test_a_rank_that_closes_its_output(run):
    done = run("os.close(1)\ntime.sleep(0.1)\nos.write(2, b'still here \\xff')\nos.close(2)")
    assert done.returncode == 0
    assert sorted(done.stderr.splitlines()) == [
        "[rank 0] still here \ufffd",
        "[rank 1] still here \ufffd",
    ]


def test_log_dir_has_all_output_of_each_rank(run, tmp_path):
    logs = tmp_path / "a" / "logs"
    done = run(
        r"os.write(1, b'out\xff'); os.write(2, b'err\n' + b'%d' % rank)", "--log-dir", str(logs)
    )
    assert done.returncode == 0
    for rank in range(2):
        log = (logs / f"rank_{rank}.log").read_bytes()
        assert log.replace(b"out\xff", b"") == b"err\n%d" % rank


def on_a_terminal(command: list[str], **variables: str) -> bytes:
    """Return what a terminal sees of a command."""
    main, other = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if "COLOR" not in name}
    environ |= {"TERM": "xterm-256color", **variables}
    seen = b""
    with subprocess.Popen(command, stdout=other, stderr=other, env=environ) as process:
        os.close(other)
        while select.select([main], [], [], 20)[0]:
            try:
                seen += os.read(main, 1000)
            except OSError:  # Linux: the end of a terminal
                break
        process.wait(20)
    os.close(main)
    return seen


STATUS = re.compile(rb"\r\x1b\[K(?:(?:\x1b\[[0-9;]*m)*rankwire: [^\r\n]*)?")


@pytest.mark.parametrize("has_color", [True, False])
def test_color_on_a_terminal(script, has_color):
    command = [*COMMAND, "-n", "2", script("print('x')")]
    seen = STATUS.sub(b"", on_a_terminal(command, **({} if has_color else {"NO_COLOR": "1"})))
    assert (b"\x1b[" in seen) == has_color
    assert sorted(re.sub(rb"\x1b\[[0-9;]*m", b"", seen).split(b"\r\n")) == [
        b"",
        b"[rank 0] x",
        b"[rank 1] x",
    ]


def test_a_status_line_on_a_terminal_never_meets_other_lines(script):
    body = """
import rankwire
with rankwire.connect() as backend:
    for i in range(50):
        print("out", i, "end")
        print("err", i, "end", file=sys.stderr)
        time.sleep(0.04)
    backend.barrier()
"""
    command = [*COMMAND, "-n", "2", script(body)]
    seen = on_a_terminal(command, NO_COLOR="1")
    statuses = [text for text in STATUS.findall(seen) if b"rankwire" in text]
    assert any(b"2 running, 2 up" in text for text in statuses), seen[-500:]
    lines = STATUS.sub(b"", seen).split(b"\r\n")
    assert lines.pop() == b""
    expected = [
        b"[rank %d] %s %d end" % (rank, kind, i)
        for rank in range(2)
        for kind in (b"out", b"err")
        for i in range(50)
    ]
    assert sorted(lines) == sorted(expected)


@pytest.mark.slow
def test_a_silent_rank_is_counted_as_suspected(script):
    body = """
import rankwire
with rankwire.connect(suspect_after=0.3, fail_after=20) as backend:
    pids = rankwire.all_gather_object(backend, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(2.5)  # for the line to be drawn, a few times
        os.kill(pids[1], signal.SIGCONT)
    backend.barrier()
"""
    command = [*COMMAND, "-n", "2", script(body)]
    assert b"2 running, 2 up, 1 suspected" in on_a_terminal(command, NO_COLOR="1")


def test_no_status_line_on_pipes(run):
    done = run("time.sleep(1.5)")
    assert (done.stdout, done.stderr) == ("", "")
