"""Worlds that form through torch's store: no secret is in it, and no other user joins."""

import contextlib
import os
import subprocess
import sys
import textwrap
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch_ranks import run_forked  # noqa: E402

import rankwire.torch.torch_rendezvous as forming  # noqa: E402
from faults.netns import Hosts, why_not  # noqa: E402
from rankwire.backends.tcp import TcpBackend  # noqa: E402
from rankwire.errors import (  # noqa: E402
    AuthenticationError,
    ConfigurationError,
    RankwireError,
    RendezvousError,
)

SHORT, LONG = timedelta(seconds=1), timedelta(seconds=30)
SECRET = "a secret of all ranks of this job"
KEYS = ["rankwire/place", "rankwire/rank 0", "rankwire/rank 1"]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in ("RANKWIRE_SECRET", "RANKWIRE_SECRET_FILE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def run(size, function, timeout=LONG):
    """Run ``function(store, rank, form)`` on forked ranks that share the file of a store."""

    def be_rank(rank, path):
        store = dist.FileStore(path, size)
        return function(store, rank, lambda: forming.form_world(store, rank, size, timeout))

    return run_forked(size, be_rank)


def meet(store, rank, form):
    with form() as world:
        world.barrier()
        return world.address


def refusal_of(form):
    with pytest.raises(RankwireError) as caught:
        form()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("name", [None, "0.0.0.0", "localhost", "192.0.2.1", "no-such-host"])
def test_ranks_of_one_host_meet_on_loopback_wherever_the_master_is(name, monkeypatch):
    if name is not None:
        monkeypatch.setenv("MASTER_ADDR", name)
    addresses = run(3, meet)
    assert addresses[0].startswith("127.0.0.1:")
    assert len(set(addresses)) == 1


def test_the_store_has_the_address_and_no_secret():
    def look(store, rank, form):
        with form() as world:
            world.barrier()
            return world.address, [store.get(key).decode() for key in KEYS], store.num_keys()

    (address, (place, *presences), count), _ = run(2, look)
    assert place == address
    identity, has_secret = presences[0].split()
    assert presences[1] == f"{identity} {has_secret}"
    assert (len(identity), has_secret) == (32, "0")
    assert count <= len(KEYS) + 1  # the store itself counts its users in one


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user needs root")
def test_another_user_of_the_host_cannot_take_a_rank():
    def run_ranks(store, rank, form):
        if rank == 0:
            with pytest.raises(RendezvousError, match="rank 1"):
                form()
            return None
        store.set(KEYS[2], store.get(KEYS[1]))  # as an honest rank 1 says of itself
        place = store.get(KEYS[0]).decode()
        "".encode("idna")  # loads a module that the other user may not be able to read
        os.setgid(65534)
        os.setuid(65534)
        os.environ.pop("XDG_RUNTIME_DIR", None)
        with pytest.raises((AuthenticationError, RendezvousError)):
            TcpBackend(1, 2, place, join_timeout=15, timeout=5)
        return "refused"

    assert run(2, run_ranks, timedelta(seconds=8))[1] == "refused"


@pytest.fixture
def elsewhere(monkeypatch):
    """Have rank 1 of every world find itself on another host."""

    def host_of(rank):
        monkeypatch.setattr(forming, "host_id", lambda: f"host {rank}")

    return host_of


def test_ranks_of_several_hosts_refuse_without_a_secret_and_say_how_to_give_one(elsewhere):
    def check(store, rank, form):
        elsewhere(rank == 1)
        return refusal_of(form)

    for kind, text in run(3, check):
        assert kind is ConfigurationError
        assert text.startswith("ranks 0, 1, 2 need the secret of the job, because the ranks of")
        lines = text.splitlines()
        assert lines[1].startswith("  (umask 077; python3 -c 'import secrets; print(")
        assert lines[2] == "  export RANKWIRE_SECRET_FILE=~/job.secret"


def test_ranks_of_several_hosts_need_an_address_of_rank_0(elsewhere, monkeypatch):
    def check(store, rank, form):
        elsewhere(rank == 1)
        monkeypatch.setenv("RANKWIRE_SECRET", SECRET)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        return refusal_of(form)

    (_, of_0), (_, of_1) = run(2, check)
    assert "set MASTER_ADDR to an address of its host" in of_0
    assert "rank 0 refused to listen" in of_1


@pytest.mark.parametrize("has_file", [True, False], ids=["RANKWIRE_SECRET_FILE", "RANKWIRE_SECRET"])
def test_a_secret_that_all_ranks_were_given_is_used(has_file, tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(SECRET)

    def check(store, rank, form):
        if has_file:
            monkeypatch.setenv("RANKWIRE_SECRET_FILE", str(file))
        else:
            monkeypatch.setenv("RANKWIRE_SECRET", SECRET)
        meet(store, rank, form)
        return store.get(KEYS[1 + rank]).decode().endswith(" 1")

    assert run(2, check) == [True, True]


def test_a_secret_that_only_some_ranks_were_given_is_refused(monkeypatch):
    def check(store, rank, form):
        if rank != 1:
            monkeypatch.setenv("RANKWIRE_SECRET", SECRET)
        return refusal_of(form)

    for _, text in run(3, check):
        assert text.startswith("rank 1 needs the secret of the job, because the other ranks have")


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_come_is_named(missing):
    def check(store, rank, form):
        if rank == missing:
            return None
        with pytest.raises(
            RendezvousError, match=rf"within 1 s; missing rank {missing}$"
        ) as caught:
            form()
        return caught.value.missing

    told = run(3, check, SHORT)
    assert [each for rank, each in enumerate(told) if rank != missing] == [[missing]] * 2


def test_lies_in_the_store_prevent_a_world_and_no_more():
    def check(store, rank, form):
        if rank == 0:
            return refusal_of(form)
        store.set(KEYS[2], "elsewhere 1")  # not what rank 1 says
        store.wait([KEYS[0]], LONG)
        return store.get(KEYS[0]).decode()

    (kind, text), place = run(2, check)
    assert kind is ConfigurationError
    assert text.startswith("rank 0 needs the secret of the job")
    assert place == "refused"


PROGRAM = """
    import os, torch, torch.distributed as dist
    import rankwire.torch
    import rankwire.torch.rpc as rpc

    rank = int(os.environ["RANK"])
    try:
        dist.init_process_group("rankwire")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=30)
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        print("sum", tensor.item(), rpc.rpc_sync(1 - rank, torch.add, args=(tensor, 1)).item())
        rpc.shutdown()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        print(error)
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("has_secret", [True, False])
def test_hosts_that_are_some_need_a_secret_and_meet_with_it(has_secret, tmp_path):
    program, secret = tmp_path / "program.py", tmp_path / "secret"
    program.write_text(textwrap.dedent(PROGRAM))
    secret.touch(mode=0o600)
    secret.write_text(SECRET)
    with contextlib.closing(Hosts(2)) as hosts:
        env = {**os.environ, "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29511"}
        env |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        if has_secret:
            env["RANKWIRE_SECRET_FILE"] = str(secret)
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", hosts.namespace(rank), sys.executable, str(program)],
                env={**env, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            told = [rank.communicate(timeout=50)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for text in told:
        assert ("sum 2.0 3.0" if has_secret else "RANKWIRE_SECRET_FILE=~/job.secret") in text, told
