"""List the environment variables of rankwire (docs/settings.md), and read the default timeout."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping

from rankwire.errors import ConfigurationError

TIMEOUT = "RANKWIRE_TIMEOUT"
RANK = "RANKWIRE_RANK"
# The rank that is being debugged: other ranks wait for it without a timeout.
DEBUG_RANK = "RANKWIRE_DEBUG_RANK"
DEFAULT_TIMEOUT = 60.0

_PREFIX = "RANKWIRE_"
KNOWN = frozenset(
    _PREFIX + name
    for name in (
        *("ADDRESS", "ADVERTISE", "COORDINATOR", "DEBUG_RANK", "FULL_TRACEBACK", "JOB"),
        *("LAUNCHER", "LISTEN", "LOG_FILE", "PORT", "RANK", "RESTART_COUNT", "ROLES"),
        *("RUNTIME_DIR", "SECRET", "SECRET_FD", "SECRET_FILE", "SECURITY", "SEGMENT", "TIMEOUT"),
        *("TLS_CA", "TLS_CERT", "TLS_DIR", "TLS_KEY", "TLS_NAMES", "WORLD_SIZE"),
    )
)
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
_OF_SERVICE = re.compile(
    r"RANKWIRE\w*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_PORT_OF_SERVICE = re.compile(r"RANKWIRE\w*_PORT=(tcp|udp|sctp)://.*")

_log = logging.getLogger("rankwire")


def without_services(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a Kubernetes service named ``rankwire``."""
    return {
        name: value
        for name, value in environ.items()
        if not _OF_SERVICE.fullmatch(name) and not _PORT_OF_SERVICE.fullmatch(f"{name}={value}")
    }


def default_timeout() -> float:
    """Return ``RANKWIRE_TIMEOUT`` or the default, in seconds; or raise ConfigurationError."""
    text = os.environ.get(TIMEOUT)
    if not text:
        return DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0.0:  # also rejects NaN
        raise ConfigurationError(
            f"{TIMEOUT} is {text!r}: set it to a number of seconds above 0, such as 60 or 0.5,"
            " or to inf for no limit"
        )
    return seconds


@functools.cache
def report_unknown() -> None:
    """Log the unknown variables with our prefix, once in a process."""
    for name in sorted(without_services(os.environ)):
        if name.startswith(_PREFIX) and name not in KNOWN:
            nearest = _nearest(name)
            _log.warning("rankwire does not know the variable %s%s", name, nearest)


def _nearest(name: str) -> str:
    from difflib import get_close_matches  # here: importing it takes 1 ms

    shorts = [known.removeprefix(_PREFIX) for known in sorted(KNOWN)]
    found = get_close_matches(name.removeprefix(_PREFIX), shorts, n=1, cutoff=0.5)
    return f": did you mean {_PREFIX}{found[0]}?" if found else ""
