"""Two ranks that call each other: at the same time, nested, with an error, with a time limit.

    rankwire run -n 2 examples/two_peers.py     two processes
    python examples/two_peers.py                the same program in one process, on threads

`talk` is all of the program, and does not know which of the two it runs on.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import rankwire


def talk(backend: rankwire.Backend) -> None:
    me, other = backend.rank, 1 - backend.rank

    def say(text: str) -> None:
        # The launcher says who speaks; in one process, we do. One write, so lines stay whole.
        prefix = "" if "RANKWIRE_RANK" in os.environ else f"[rank {me}] "
        sys.stdout.write("".join(f"{prefix}{line}\n" for line in text.splitlines()))

    with rankwire.RpcAgent(backend) as agent:

        @agent.register
        def greet(name: str) -> str:
            return f"hello {name}, this is rank {me}"

        @agent.register
        def bounce(path: list[int], depth: int) -> list[int]:
            """Call back whoever called, `depth` times; return the ranks on the way."""
            path = [*path, me]
            return agent.rpc_sync(other, "bounce", path, depth - 1) if depth else path

        @agent.register
        def divide(a: float, b: float) -> float:
            return a / b

        @agent.register
        def sleep(seconds: float) -> str:
            """Sleep, but not longer than anybody waits for it."""
            end = time.monotonic() + seconds
            call = rankwire.current_call()
            while time.monotonic() < end and not (call and call.cancelled):
                time.sleep(0.01)
            return "slept"

        backend.barrier()  # both have registered what the other will call

        # Both ranks wait for each other here, and both are served.
        say(agent.rpc_sync(other, "greet", f"rank {me}"))

        # Several calls under way at once; their results in any order.
        futures = [agent.rpc_async(other, "divide", n, 2) for n in range(5)]
        say(f"halves: {[future.result() for future in futures]}")

        # A call that calls back, which calls back: each rank waits and serves at the same time.
        say(f"the way of a nested call: {agent.rpc_sync(other, 'bounce', [me], 6)}")

        # What the function raises comes back, with the traceback of where it happened. It is a
        # ZeroDivisionError too.
        try:
            agent.rpc_sync(other, divide, 1, 0)
        except rankwire.RemoteError as error:
            say(f"{error.remote_type} at rank {other}; its traceback:\n{error.remote_traceback}")

        # A call ends when its time is over, and the callee learns that nobody waits any more.
        start = time.monotonic()
        try:
            agent.to(other, timeout=0.3).sleep(30.0)
        except TimeoutError as error:
            say(f"{type(error).__name__} after {time.monotonic() - start:.1f} s")

        # The connection is as good as before.
        say(f"1 / 4 = {agent.rpc_sync(other, divide, 1, 4)}")


if __name__ == "__main__":
    if "RANKWIRE_RANK" in os.environ:
        with rankwire.connect() as backend:
            if backend.world_size != 2:
                raise SystemExit("this is a talk between two: run with -n 2")
            talk(backend)
    else:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(talk, rankwire.SimulatedBackend.create_group(2)))
