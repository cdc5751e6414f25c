"""The serving threads: the thread that reads a request runs its function.

One worker at a time has the *polling role*: it waits for requests, runs them one after the other,
and keeps the role while they are short. A call takes 10 to 16 us so, and 56 to 60 with a hand-over.
If a function was slow the last time, or makes a call itself, the *standby* gets the role before the
function continues. If a function still runs at the second check, 1 ms later, the standby takes it.

The standby is an idle worker that checks the poller every millisecond while there is traffic. A
third worker starts only when the standby has become the poller. At most ``workers`` calls of depth
0 run at once; more wait in a bounded queue. Nested calls get threads of their own, up to
``max_nested``, because nested calls that share a bounded pool deadlock. Beyond a limit a call is
refused.

Lock: ``JobQueue.mutex`` guards roles, counts and queues. No thread polls, runs or replies under it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import RankwireError
from rankwire.fork import guard

_log = logging.getLogger("rankwire")

_CHECK_EVERY = 0.001
SLOW = 0.001  # a function that runs longer delays other calls
_SPARE_CHECK = 0.003  # if nothing is served: at 1 ms there are 54 k calls a second, at 3 ms 65 k
_CHECKS_UNTIL_ASLEEP = 50
_LAZY_CHECK = 0.05
_LINGER = 2.0  # seconds an idle worker stays


class Paced(Protocol):
    """A function; another thread should poll while a slow one runs."""

    is_slow: bool


class Job(Protocol):
    """One admitted call: run it, or notify its caller that it will not run. Must not raise."""

    depth: int

    @property
    def function(self) -> Paced: ...  # noqa: D102
    def run(self, worker: Worker) -> None: ...  # noqa: D102
    def refuse(self, reason: str) -> None: ...  # noqa: D102
    def note_pace(self, seconds: float) -> None: ...  # noqa: D102


class Limits(NamedTuple):
    """What an agent serves at once; described at ``RpcAgent``."""

    workers: int
    max_queued: int
    max_nested: int


class JobSource(NamedTuple):
    """Where jobs come from."""

    poll: Callable[[], list[Job]]  # called by one thread at a time; raises RankwireError at the end
    wake: Callable[[], None]  # makes ``poll`` return
    on_check: Callable[[], bool]  # called by the standby; returns whether to check further
    on_end: Callable[[], None]  # called once when ``poll`` has ended by itself


class Worker:
    """The record of one serving thread, made by that thread."""

    __slots__ = ("began", "ident", "job", "pool", "wakeup")

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.ident = runtime.get_ident()
        self.job: Job | None = None  # None while it polls or waits
        self.began = 0.0  # when the job began
        self.wakeup = runtime.Lock()
        self.wakeup.acquire()

    def wake(self) -> None:
        """Wake the thread. Idempotent until it wakes."""
        if self.wakeup.locked():
            self.wakeup.release()


class JobQueue:
    """The jobs that have not begun, and the number that run."""

    def __init__(self, poll: Callable[[], list[Job]], limits: Limits) -> None:
        self._poll = poll
        self._workers, self._max_queued, self._max_nested = limits
        self.mutex = runtime.Lock()
        self.arrived: deque[Job] = deque()  # read, not yet admitted; owned by the poller
        self.waiting: deque[Job] = deque()  # for a worker
        self.running = 0  # jobs of depth 0
        self.running_nested = 0

    def next(self) -> Job | None:
        """Poll if no job has arrived; return a job that may run now, if there is one."""
        if self.waiting and (waited := self.take_waiting()) is not None:
            return waited
        if not self.arrived:
            self.arrived.extend(self._poll())
            if not self.arrived:
                return None
        job = self.arrived.popleft()
        with self.mutex:
            if not job.depth and self.running < self._workers and not self.waiting:
                self.running += 1
                return job
            refusal = self._admit(job)  # None: run it; "": it waits
        if refusal is None:
            return job
        if refusal:
            job.refuse(refusal)  # without the lock, because it sends a reply
        return None

    def _admit(self, job: Job) -> str | None:
        # The mutex is held.
        if job.depth > 0:
            if self.running_nested < self._max_nested:
                self.running_nested += 1
                return None
            return f"{self._max_nested} nested calls are running"
        if len(self.waiting) < self._max_queued:
            self.waiting.append(job)
            return ""
        return f"{self._workers} calls are running and {self._max_queued} waiting"

    def take_waiting(self) -> Job | None:
        """Return a waiting job to run, if a worker is free for it."""
        with self.mutex:
            if self.waiting and self.running < self._workers:
                self.running += 1
                return self.waiting.popleft()
        return None

    def take_back(self, job: Job) -> bool:
        """Remove a job that waits for a worker; return False if it does not wait."""
        with self.mutex:
            is_waiting = job in self.waiting
            if is_waiting:
                self.waiting.remove(job)
        return is_waiting

    def jobs(self) -> list[Job]:
        """Return the jobs that have not begun."""
        with self.mutex:
            return [*self.waiting, *self.arrived.copy()]


class Pool:
    """Threads that poll for jobs and run them."""

    def __init__(self, source: JobSource, limits: Limits, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self.queue = JobQueue(source.poll, limits)
        self.arrived = self.queue.arrived
        self._mutex = self.queue.mutex
        self._runs = 0
        self._poller: Worker | None = None
        self._standby: Worker | None = None
        self._standby_sleeps = False
        self._idle: list[Worker] = []
        self._threads: dict[runtime.Thread, None] = {}  # in order of their start
        self._closing = False
        guard(self)

    def start(self) -> None:
        """Start the poller and the standby."""
        with self._mutex:
            self._start_thread()
            self._start_thread()

    def add(self, job: Job) -> None:
        """Run a job that ``poll`` did not return. Safe from any thread."""
        self.arrived.append(job)
        self._source.wake()

    def expect_work(self) -> None:
        """Wake the standby, because outstanding work needs checks."""
        if self._standby_sleeps:
            with self._mutex:
                if self._standby is not None and self._standby_sleeps:
                    self._standby_sleeps = False
                    self._standby.wake()

    def about_to_block(self, worker: Worker) -> None:
        """Let another thread poll, because the function that runs here will wait."""
        if self._poller is worker:
            with self._mutex:
                # Without a job it is in poll(): then another thread calls this for an old call.
                if self._poller is worker and worker.job is not None:
                    self._hand_over()

    def has_more(self, worker: Worker) -> bool:
        """Whether this worker is the poller, and its next job is a short one."""
        try:
            return self._poller is worker and not self.arrived[0].function.is_slow
        except IndexError:  # a new poller may have just taken it
            return False

    def is_poller(self, worker: Worker | None) -> bool:
        """Whether this worker has the polling role."""
        return self._poller is worker

    def close(self, deadline: Deadline) -> bool:
        """Stop the threads; return False if a function, and its thread, outlasts the deadline."""
        self._dismiss()
        with self._mutex:
            threads = [each for each in self._threads if each is not runtime.current_thread()]
        self._source.wake()
        for thread in threads:
            self._clock.join(thread, deadline.sleep_limit())
        return not any(thread.is_alive() for thread in threads)

    def close_in_child(self) -> None:
        """End the threads in a forked child, to which a function that forked returns."""
        self._mutex = self.queue.mutex = runtime.Lock()
        self._closing = True

    # -- roles -------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        thread = runtime.Thread(target=self._run_thread, name="rankwire-serving", daemon=True)
        self._threads[thread] = None
        thread.start()

    def _run_thread(self) -> None:
        worker = Worker(self)
        try:
            while self._find_role(worker):
                if self._poller is worker:
                    self._serve(worker)
                elif self._standby is worker:
                    self._stand_by(worker)
        except RankwireError:  # the port has ended: nothing will come any more
            if self._dismiss():
                self._source.on_end()
        except BaseException:
            # A defect of ours, or of a callback: calls must not wait for a thread that has ended.
            _log.exception("a serving thread has ended; another one takes its place")
            self._replace(worker)
        finally:
            with self._mutex:
                self._threads.pop(runtime.current_thread(), None)

    def _replace(self, worker: Worker) -> None:
        with self._mutex:
            if self._poller is worker:
                self._poller = None
            if self._standby is worker:
                self._standby = None
            if not self._closing:
                self._start_thread()

    def _find_role(self, worker: Worker) -> bool:
        with self._mutex:
            if self._closing:
                return False
            if self._poller is None:
                self._poller = worker
            if self._poller is worker:  # now, or while it was the standby
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
        with self._mutex:
            is_first = not self._closing
            self._closing = True
            for worker in (*self._idle, *([self._standby] if self._standby else ())):
                worker.wake()
        return is_first

    def _serve(self, worker: Worker) -> None:
        queue = self.queue
        while not self._closing:
            if (job := queue.next()) is None:
                continue
            if job.function.is_slow:
                with self._mutex:
                    if self._poller is worker:
                        self._hand_over()
            if not self._run(worker, job):
                # It lost the role, so it is a free worker for the waiting jobs.
                while not self._closing and (waiting := queue.take_waiting()) is not None:
                    self._run(worker, waiting)
                return
        with self._mutex:
            if self._poller is worker:
                self._poller = None

    def _run(self, worker: Worker, job: Job) -> bool:
        now = self._clock.now
        worker.began = begin = now()
        self._runs += 1
        worker.job = job
        # After the job is set: the standby sets this flag and then looks for a job, so one of the
        # two sees the other.
        if self._standby_sleeps:
            self.expect_work()
        try:
            job.run(worker)
        finally:
            seconds = now() - begin
            if seconds > SLOW or job.function.is_slow:
                job.note_pace(seconds)
            with self._mutex:
                # Under one lock with the role: a standby that takes the role of a finished job
                # would make two pollers.
                worker.job = None
                if job.depth > 0:
                    self.queue.running_nested -= 1
                else:
                    self.queue.running -= 1
                has_role = self._poller is worker
        return has_role

    # -- the standby -------------------------------------------------------------------------------

    def _stand_by(self, worker: Worker) -> None:
        seen: Job | None = None
        quiet, runs = 0, -1
        while True:
            served, runs = self._runs != runs, self._runs
            if self._sleep_between_checks(worker, quiet, _CHECK_EVERY if served else _SPARE_CHECK):
                quiet = 0
            with self._mutex:
                if self._closing or self._standby is not worker:
                    return
                running = self._poller.job if self._poller is not None else None
                if self._poller is None or (running is not None and running is seen):
                    self._poller = worker
                    self._standby = None
                    self._wake_another()
                    return
                seen = running
            needs_checks = self._source.on_check()
            quiet = 0 if running is not None else quiet + 1
            if needs_checks:
                quiet = min(quiet, _CHECKS_UNTIL_ASLEEP)

    def _sleep_between_checks(self, worker: Worker, quiet: int, seconds: float) -> bool:
        if quiet < _CHECKS_UNTIL_ASLEEP:
            return self._clock.acquire(worker.wakeup, True, seconds)
        with self._mutex:
            self._standby_sleeps = True
            if self._closing or self._poller is None or self._poller.job is not None:
                self._standby_sleeps = False
                return True
        # Work may have become outstanding after the last check, before ``_standby_sleeps`` was set.
        lazily = quiet == _CHECKS_UNTIL_ASLEEP or self._source.on_check()
        woken = self._clock.acquire(worker.wakeup, True, _LAZY_CHECK if lazily else -1)
        self._standby_sleeps = False
        return woken

    def _hand_over(self) -> None:
        self._poller = None
        self._standby_sleeps = False
        if self._standby is not None:
            self._standby.wake()
        else:
            self._wake_another()

    def _wake_another(self) -> None:
        if self._idle:
            self._idle.pop().wake()
        else:
            self._start_thread()
