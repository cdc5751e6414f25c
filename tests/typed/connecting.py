"""connect() has its options by name."""

from typing import assert_type

import rankwire


def join(tls: rankwire.Tls | None) -> None:
    assert_type(rankwire.connect(), rankwire.TcpBackend)
    rankwire.connect(timeout=None, join_timeout=5, transport="tcp", tls=tls)
    rankwire.connect(rank=0, world_size=2, address="127.0.0.1:0", secret=b"16 bytes or more")
    rankwire.connect(timeot=5)  # error: Unexpected keyword argument "timeot"
    rankwire.connect(timeout="5")  # error: Argument "timeout" to "connect"
    rankwire.connect(transport="udp")  # error: Argument "transport" to "connect"
    rankwire.connect("127.0.0.1:0")  # error: Too many positional arguments
