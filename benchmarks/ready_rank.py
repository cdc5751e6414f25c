"""One rank of the world whose start ``benchmarks.startup`` times: join, say when, wait, leave.

It imports nothing but rankwire, because its own imports would be counted too.
"""

import sys
import time

import rankwire

TIMEOUT = 60.0

if __name__ == "__main__":
    rank, world_size, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    with rankwire.TcpBackend(rank, world_size, address, timeout=TIMEOUT):
        # CLOCK_MONOTONIC is one clock for all processes of a host.
        print(time.monotonic(), flush=True)
        sys.stdin.read()
