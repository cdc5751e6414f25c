"""Threads, sockets, polls, process ids and entropy of the machine.

Other modules look these up here at each use (``runtime.Lock()``), so that a simulation can replace
them. They are the real objects, so this costs nothing.
"""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections.abc import Callable
from fcntl import ioctl
from os import EFD_CLOEXEC, EFD_NONBLOCK, eventfd, eventfd_read, eventfd_write, getpid, sched_yield
from queue import Empty, SimpleQueue
from random import Random, uniform
from secrets import randbits, token_bytes, token_hex
from select import EPOLLIN, EPOLLONESHOT, PIPE_BUF, POLLIN, POLLOUT, epoll, poll
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector, DefaultSelector, PollSelector
from socket import (
    AF_INET,
    AF_UNIX,
    CMSG_SPACE,
    IPPROTO_TCP,
    MSG_CMSG_CLOEXEC,
    MSG_DONTWAIT,
    MSG_PEEK,
    SCM_CREDENTIALS,
    SCM_RIGHTS,
    SHUT_RDWR,
    SO_ERROR,
    SO_KEEPALIVE,
    SO_PASSCRED,
    SO_PEERCRED,
    SO_REUSEADDR,
    SO_SNDBUF,
    SOCK_DGRAM,
    SOCK_NONBLOCK,
    SOCK_SEQPACKET,
    SOCK_STREAM,
    SOL_SOCKET,
    TCP_INFO,
    TCP_KEEPCNT,
    TCP_KEEPIDLE,
    TCP_KEEPINTVL,
    TCP_NODELAY,
    TCP_USER_TIMEOUT,
    create_server,
    getaddrinfo,
    if_nameindex,
    inet_ntoa,
    send_fds,
    socketpair,
)
from socket import socket as Socket
from threading import (
    Barrier,
    Condition,
    Event,
    ExceptHookArgs,
    Lock,
    RLock,
    Thread,
    current_thread,
    get_ident,
    local,
    main_thread,
)
from threading import enumerate as list_threads
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

ThreadHook = Callable[[ExceptHookArgs], Any]


def wrap_thread_excepthook(wrap: Callable[[ThreadHook], ThreadHook]) -> None:
    """Replace the hook for uncaught errors of threads by ``wrap(hook)``."""
    threading.excepthook = wrap(threading.excepthook)


def new_event_loop() -> AbstractEventLoop:
    """Return a new event loop."""
    import asyncio  # here: importing it takes as long as all of this package

    return asyncio.new_event_loop()
