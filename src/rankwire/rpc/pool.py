"""The serving pool: the thread that read the request runs the function.

One worker at a time has the *polling role*: it waits for requests, runs them itself, one after the
other, and keeps the role while they are short. Another one takes the role only when that is needed:

===============================================  ==========================================
the poller's function                            who polls then
===============================================  ==========================================
returns soon                                     the same thread goes on; no hand-over
                                                 (10-16 us a call, 56-60 with one)
was slow the last time, or makes a call itself   the standby, handed over before it runs on
is still running at the second look, 1 ms later  the standby, by taking the role
===============================================  ==========================================

The standby is one waiting worker that looks at the poller every millisecond while there is traffic,
and sleeps when there is none. A third one is started only when the standby has become the poller.

Limits: at most ``workers`` calls of depth 0 run at once, more wait in a bounded queue; nested calls
(depth 1 and more) get threads of their own up to ``max_nested``, because a bounded pool that nested
calls have to share deadlocks. Beyond a limit the call is refused, never left waiting. The bytes of
waiting calls are bounded before they are sent (``room``).

Lock: ``_mutex`` guards the roles, the counts and the queues; it is not held while polling, running
a function or replying.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import RankwireError
from rankwire.fork import guard
from rankwire.rpc.worker import Job, Worker

_log = logging.getLogger("rankwire")

_LOOK_EVERY = 0.001
_SLOW = 0.001  # a function that runs longer than this keeps others waiting
# Where nothing is served there is no poller to watch, only replies that nobody waits for; each look
# takes the interpreter lock from whoever calls (54 k calls a second at 1 ms, 65 k at 3 ms).
_SPARE_LOOK = 0.003
_LOOKS_UNTIL_ASLEEP = 50
_LAZY_LOOK = 0.05
_LINGER = 2.0  # seconds an idle worker stays


class Pool:
    """Threads that poll for jobs and run them.

    Args:
        poll: Waits for something to do and returns the jobs that came; called by one thread at a
            time. Raises a ``RankwireError`` at the end.
        wake: Makes ``poll`` return.
        on_look: Called by the standby at each look; returns whether something is outstanding that
            needs looks.
        on_end: Called once when the port has ended by itself.
        clock: By which its threads wait, and functions are slow.
        workers: Calls of depth 0 that run at once.
        max_queued: Calls of depth 0 that wait for a worker.
        max_nested: Nested calls that run at once.

    Attributes:
        arrived: Jobs that were read and not looked at; the poller's.

    Size: roles, counts and queues change together, under one mutex.
    """

    def __init__(
        self,
        *,
        poll: Callable[[], list[Job]],
        wake: Callable[[], None],
        on_look: Callable[[], bool],
        on_end: Callable[[], None],
        clock: Clock,
        workers: int,
        max_queued: int,
        max_nested: int,
    ) -> None:
        self._poll = poll
        self._wake = wake
        self._on_look = on_look
        self._on_end = on_end
        self._clock, self._now = clock, clock.now
        self._workers = workers
        self._max_queued = max_queued
        self._max_nested = max_nested
        self._mutex = threading.Lock()
        self.arrived: deque[Job] = deque()
        self._queued: deque[Job] = deque()
        self._running = 0
        self._runs = 0
        self._running_nested = 0
        self._poller: Worker | None = None
        self._standby: Worker | None = None
        self._standby_sleeps = False
        self._idle: list[Worker] = []
        self._threads: set[threading.Thread] = set()
        self._closing = False
        guard(self)

    def start(self) -> None:
        """Start the poller and the standby."""
        with self._mutex:
            self._start_thread()
            self._start_thread()

    # -- seen from outside -------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Have a job done that did not come through ``poll``. Safe from any thread."""
        self.arrived.append(job)
        self._wake()

    def expect_work(self) -> None:
        """Have the standby look, because something is outstanding now."""
        if self._standby_sleeps:
            with self._mutex:
                if self._standby is not None and self._standby_sleeps:
                    self._standby_sleeps = False
                    self._standby.wake()

    def about_to_block(self, worker: Worker) -> None:
        """Called by a running function that will wait: somebody else should poll meanwhile."""
        if self._poller is worker:
            with self._mutex:
                # Without a job it is in poll(), and whoever asks is not the function it served.
                if self._poller is worker and worker.job is not None:
                    self._hand_over()

    def has_more(self, worker: Worker) -> bool:
        """Whether this worker, as the poller, has more short jobs at hand and polls after them."""
        try:
            return self._poller is worker and not self.arrived[0].function.is_slow
        except IndexError:  # there is none, or a new poller has just taken it
            return False

    def is_poller(self, worker: Worker) -> bool:
        """Whether this worker has the polling role."""
        return self._poller is worker

    def queued(self) -> list[Job]:
        """Return the jobs that have not begun, because no worker is free or has come to them."""
        with self._mutex:
            return [*self._queued, *self.arrived.copy()]

    def take_back(self, job: Job) -> bool:
        """Free the place of a job that waits for a worker; False if it does not."""
        with self._mutex:
            try:
                self._queued.remove(job)
            except ValueError:
                return False
        return True

    def close(self, deadline: Deadline) -> bool:
        """Stop the threads.

        Returns False if a function still runs at the deadline (its thread ends when it does).
        """
        self._dismiss()
        with self._mutex:
            threads = self._threads - {threading.current_thread()}
        self._wake()
        for thread in threads:
            self._clock.join(thread, deadline.sleep_limit())
        return not any(thread.is_alive() for thread in threads)

    def close_in_child(self) -> None:
        """End in a child of a fork: a function that has forked returns to here there."""
        self._mutex = threading.Lock()
        self._closing = True

    # -- a worker's life ---------------------------------------------------------------------------

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._live, name="rankwire-serving", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _live(self) -> None:
        worker = Worker(self)
        try:
            while self._find_role(worker):
                if self._poller is worker:
                    self._serve(worker)
                elif self._standby is worker:
                    self._stand_by(worker)
        except RankwireError:  # the port has ended: nothing will come any more
            if self._dismiss():
                self._on_end()
        except BaseException:
            # A mistake of ours, or of somebody's callback: others must not wait for this thread.
            _log.exception("a serving thread has ended; another one takes its place")
            self._replace(worker)
        finally:
            with self._mutex:
                self._threads.discard(threading.current_thread())

    def _replace(self, worker: Worker) -> None:
        with self._mutex:
            if self._poller is worker:
                self._poller = None
            if self._standby is worker:
                self._standby = None
            if not self._closing:
                self._start_thread()

    def _find_role(self, worker: Worker) -> bool:
        """Take the role that is free, or wait for one; False when this thread should end."""
        with self._mutex:
            if self._closing:
                return False
            if self._poller is None:
                self._poller = worker
            if self._poller is worker:  # now, or since it stood by
                return True
            if self._standby is None:
                self._standby = worker
                return True
            self._idle.append(worker)
        self._clock.acquire(worker.wakeup, True, _LINGER)
        with self._mutex:
            if worker in self._idle:
                self._idle.remove(worker)
                return False
            return not self._closing

    def _dismiss(self) -> bool:
        """Let all threads end that run nothing; return whether that is new to them."""
        with self._mutex:
            is_first = not self._closing
            self._closing = True
            for worker in (*self._idle, *([self._standby] if self._standby else ())):
                worker.wake()
        return is_first

    # -- polling -----------------------------------------------------------------------------------

    def _serve(self, worker: Worker) -> None:
        """Poll and run until the role is lost."""
        while not self._closing:
            job = self._next_job()
            if job is None:
                continue
            if job.function.is_slow:
                with self._mutex:
                    if self._poller is worker:
                        self._hand_over()
            if not self._run(worker, job):
                # Without the role: take over what waits for a free worker.
                while not self._closing and (queued := self._take_queued()) is not None:
                    self._run(worker, queued)
                return
        with self._mutex:
            if self._poller is worker:
                self._poller = None

    def _next_job(self) -> Job | None:
        if self._queued and (queued := self._take_queued()) is not None:
            return queued
        if not self.arrived:
            self.arrived.extend(self._poll())
            if not self.arrived:
                return None
        job = self.arrived.popleft()
        with self._mutex:
            if not job.depth and self._running < self._workers and not self._queued:
                self._running += 1
                return job
            refusal = self._admit(job)
        if refusal is None:
            return job
        if refusal:
            job.refuse(refusal)  # without the lock: it tells its caller
        return None

    def _admit(self, job: Job) -> str | None:
        """Count in a job that cannot run at once, unless it is nested. Mutex held.

        Returns None if it may run, nothing if it is queued, else why it is refused.
        """
        if job.depth > 0:
            if self._running_nested < self._max_nested:
                self._running_nested += 1
                return None
            return f"{self._max_nested} nested calls are running"
        if len(self._queued) < self._max_queued:
            self._queued.append(job)
            return ""
        return f"{self._workers} calls are running and {self._max_queued} waiting"

    def _take_queued(self) -> Job | None:
        with self._mutex:
            if self._queued and self._running < self._workers:
                self._running += 1
                return self._queued.popleft()
        return None

    def _run(self, worker: Worker, job: Job) -> bool:
        """Do a job; return whether the worker still has the polling role."""
        now = self._now
        worker.began = begin = now()
        self._runs += 1
        worker.job = job
        # In this order: the standby announces its sleep first and looks for a job second, so one of
        # the two sees the other.
        if self._standby_sleeps:
            self.expect_work()
        try:
            job.run(worker)
        finally:
            seconds = now() - begin
            if seconds > _SLOW or job.function.is_slow:
                job.finished(seconds)
            with self._mutex:
                # With the role in one step: a standby that takes it from a finished job would make
                # two pollers.
                worker.job = None
                if job.depth > 0:
                    self._running_nested -= 1
                else:
                    self._running -= 1
                has_role = self._poller is worker
        return has_role

    # -- standing by -------------------------------------------------------------------------------

    def _stand_by(self, worker: Worker) -> None:
        """Look after the poller until its role is ours."""
        seen: Job | None = None
        quiet, runs = 0, -1
        while True:
            served, runs = self._runs != runs, self._runs
            if self._sleep_between_looks(worker, quiet, _LOOK_EVERY if served else _SPARE_LOOK):
                quiet = 0
            with self._mutex:
                if self._closing or self._standby is not worker:
                    return
                running = self._poller.job if self._poller is not None else None
                if self._poller is None or (running is not None and running is seen):
                    self._poller = worker
                    self._standby = None
                    self._call_another()
                    return
                seen = running
            outstanding = self._on_look()
            quiet = 0 if running is not None else quiet + 1
            if quiet > _LOOKS_UNTIL_ASLEEP and outstanding:
                quiet = _LOOKS_UNTIL_ASLEEP

    def _sleep_between_looks(self, worker: Worker, quiet: int, seconds: float) -> bool:
        """Sleep shortly, or longer if it has been quiet; return whether somebody woke us."""
        if quiet < _LOOKS_UNTIL_ASLEEP:
            return self._clock.acquire(worker.wakeup, True, seconds)
        with self._mutex:
            self._standby_sleeps = True
            if self._closing or self._poller is None or self._poller.job is not None:
                self._standby_sleeps = False
                return True
        # At this very count something is outstanding that must be looked after now and then; and
        # something may have become so after the last look and before our sleep was announced.
        lazily = quiet == _LOOKS_UNTIL_ASLEEP or self._on_look()
        woken = self._clock.acquire(worker.wakeup, True, _LAZY_LOOK if lazily else -1)
        self._standby_sleeps = False
        return woken

    def _hand_over(self) -> None:
        """The poller gives its role away."""
        self._poller = None
        self._standby_sleeps = False
        if self._standby is not None:
            self._standby.wake()
        else:
            self._call_another()

    def _call_another(self) -> None:
        """Have another worker find that a role is free."""
        if self._idle:
            self._idle.pop().wake()
        else:
            self._start_thread()
