"""What a session of tests has whatever started it: signals as at a terminal, cheap child processes.

Under ``nohup``, in the background of a shell without job control and in some containers, signals
are inherited as ignored, by the children of tests too: these would not end when they are told to.

Most of the processor's time of the suite is spent by child processes, and most of that by their
imports: 0.40 s each without cached bytecode and with the threads that OpenBLAS starts (an
environment that forbids bytecode is usual in containers), 0.16 s with one and without the other.
"""

import os
import signal
import sys
from types import FrameType

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    _reset_signals()
    _make_children_cheap()


def _reset_signals() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Children begin with the default where their parent has a handler. This process goes on after
    # its terminal is gone, as whoever started it with nohup wants it to.
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _stay)


def _stay(_number: int, _frame: FrameType | None) -> None:
    """Do nothing."""


def _make_children_cheap() -> None:
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
