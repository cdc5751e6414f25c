"""Start the ranks of this host, directed by ``job`` on node 0 and by ``nodes`` elsewhere."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rankwire import runtime
from rankwire.errors import ConfigurationError
from rankwire.launch.host_ranks import HostRanks
from rankwire.launch.job import LaunchedJob
from rankwire.launch.nodes import follow
from rankwire.launch.output import STOPPING, Loop, Output, collected_signals
from rankwire.launch.process import Subreaper
from rankwire.launch.reaper import Reaper
from rankwire.launch.run_options import MAKE_A_SECRET, RunOptions
from rankwire.observe.tracebacks import is_everything_printed
from rankwire.rendezvous.coordinator_host import bind
from rankwire.rendezvous.reachability import allow_files
from rankwire.rendezvous.runtime_dir import RUNTIME_DIR, WHAT_TO_SET, find_runtime_folder
from rankwire.rendezvous.secret import MIN_SECRET_NBYTES, read_secret_file
from rankwire.transports.security import choose_policy, files_of
from rankwire.transports.tcp_stream import TcpAddress

_SECRET_NBYTES = 32
_LOOPBACKS = ("127.0.0.1:0", "[::1]:0")
_OWN_DESCRIPTORS = 24  # of the launcher itself, also for a rank that is being started
_DESCRIPTORS_OF_RANK = 4  # two pipes, its socket for the secret, and its connection


def run(options: RunOptions) -> int:
    """Start a Python program as several processes, wait for them, and return the exit code.

    The code is 0 if all ranks ended with 0 (for a restarted rank, its last process). Otherwise it
    is that of the rank that failed first, or 128 + the signal that killed it or stopped the
    launcher. All hosts return the same code. Raise ConfigurationError if an option is invalid,
    before anything is started. Main thread only.
    """
    options.check()
    secret = _secret(options.secret_file)
    # Read now, to fail early; ``HostRanks.start`` checks the files of the ranks.
    tls = None if options.tls_dir is None else files_of(options.tls_dir, "launcher")
    master = TcpAddress.parse(options.hosts.master or _LOOPBACKS[0])
    policy = choose_policy("auto", master, tls=tls)
    if options.tls_dir is not None:  # a program may change its working directory
        options = replace(options, tls_dir=options.tls_dir.absolute())
    _fill_standard_fds()
    _check_descriptors(options.ranks, has_logs=options.log_dir is not None)
    with contextlib.ExitStack() as stack:
        # poll, not epoll: the launcher's output may be a regular file.
        selector = stack.enter_context(runtime.PollSelector())
        output = Output(
            selector,
            has_prefix=options.has_prefix,
            has_status=options.debugged is None,
            log_dir=options.log_dir,
            folds_repeats=not is_everything_printed(),
        )
        stack.callback(output.close)
        stack.enter_context(_runtime_folder(output))
        signals = stack.enter_context(collected_signals(selector, (*STOPPING, signal.SIGCHLD)))
        loop = Loop(selector, signals, output)
        try:
            reaper = stack.enter_context(Reaper(options.grace))
        except OSError as error:
            raise ConfigurationError(f"no process can be started: {error}") from error
        subreaper = stack.enter_context(contextlib.closing(Subreaper(reaper)))
        if not subreaper.is_adopting:
            output.say("processes that ranks start in other sessions may be left running here")
        listener = None
        if options.hosts.node == 0:
            listener, address = _listen(options, output)
            options = replace(options, hosts=replace(options.hosts, master=address))
        local = HostRanks(options, loop, subreaper, secret)
        stack.callback(local.close)
        if listener is None:
            return follow(loop, local, options, secret=secret, policy=policy)
        job = LaunchedJob(loop, local, options, listener=listener, secret=secret, policy=policy)
        stack.callback(job.close)
        return job.run()


def _listen(options: RunOptions, output: Output) -> tuple[runtime.Socket, str]:
    """Bind before the address is announced, so that no other process can take the port."""
    master = options.hosts.master
    listener = bind(master) if master is not None else _bind_loopback()
    host, port = listener.getsockname()[:2]
    if (
        options.hosts.nodes > 1
        and ipaddress.ip_address(host).is_loopback
        and host not in str(master)
    ):
        output.say(f"{master} is {host} here, where no other host reaches it", "bold yellow")
    return listener, master or str(TcpAddress(host, port))


def _secret(secret_file: Path | None) -> bytes:
    if secret_file is None:
        return runtime.token_bytes(_SECRET_NBYTES)
    secret = read_secret_file(str(secret_file), named=f"--secret-file {secret_file}")
    if len(secret) < MIN_SECRET_NBYTES:
        raise ConfigurationError(
            f"--secret-file {secret_file} has {len(secret)} bytes, at least {MIN_SECRET_NBYTES}"
            f" are needed; make one with {MAKE_A_SECRET}"
        )
    return secret


@contextlib.contextmanager
def _runtime_folder(output: Output) -> Iterator[None]:
    """Provide a safe folder for socket files; report one that is not the default."""
    before = os.environ.get(RUNTIME_DIR)
    with contextlib.ExitStack() as stack:
        try:
            folder, trouble = find_runtime_folder()
        except ConfigurationError as error:
            trouble = error.message.removesuffix(f". {WHAT_TO_SET}")
            try:
                made = tempfile.TemporaryDirectory(prefix="rankwire-", ignore_cleanup_errors=True)
            except OSError:  # not needed by ranks that use TCP
                output.say(error.message, "bold yellow")
                yield
                return
            folder = Path(stack.enter_context(made))
        if trouble:
            output.say(f"{trouble}; {folder} is used instead. {WHAT_TO_SET}", "bold yellow")
            if before is None:
                stack.callback(os.environ.pop, RUNTIME_DIR)
            else:
                stack.callback(os.environ.__setitem__, RUNTIME_DIR, before)
            os.environ[RUNTIME_DIR] = str(folder)
        yield


def _bind_loopback() -> runtime.Socket:
    """Bind to the first loopback address that works; in a container the interface may be down."""
    troubles = []
    for address in _LOOPBACKS:
        try:
            listener = bind(address)
        except ConfigurationError as error:
            troubles.append(error.message)
            continue
        try:
            with runtime.Socket(listener.family, runtime.SOCK_DGRAM) as probe:
                probe.connect(listener.getsockname())  # looks up a route and sends nothing
        except OSError as error:
            troubles.append(f"{listener.getsockname()[0]}: {error.strerror}")
            listener.close()
        else:
            return listener
    raise ConfigurationError(
        f"no loopback address works on this host ({'; '.join(troubles)});"
        " `ip link set lo up` brings them up"
    )


def _check_descriptors(ranks: int, *, has_logs: bool) -> None:
    if lacking := allow_files(_OWN_DESCRIPTORS + ranks * (_DESCRIPTORS_OF_RANK + has_logs)):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = limit + lacking
        raise ConfigurationError(
            f"{ranks} rank{'s'[: ranks > 1]} need {needed} open files in the launcher, and the"
            f" limit is {limit}: raise it, for example with `ulimit -n {max(1024, 2 * needed)}`"
        )


def _fill_standard_fds() -> None:
    """Open /dev/null for a closed stdin, stdout or stderr, before a pipe gets its descriptor."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
