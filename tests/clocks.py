"""Clocks made by hand, for worlds that must not use another one."""

from collections import Counter

from rankwire.clock import Clock


class FastClock(Clock):
    """Time that runs some times as fast as the real one, and counts how it is used."""

    def __init__(self, pace=1.0):
        super().__init__()
        self.pace = pace
        self.uses = Counter()
        now, sleep, acquire = self.now, self.sleep, self.acquire

        def fast_now():
            self.uses["now"] += 1
            return now() * pace

        def fast_sleep(seconds):
            self.uses["sleep"] += 1
            sleep(seconds / pace)

        def fast_acquire(lock, blocking, seconds):
            self.uses["acquire"] += 1
            return acquire(lock, blocking, seconds if seconds < 0 else seconds / pace)

        self.now, self.sleep, self.acquire = fast_now, fast_sleep, fast_acquire

    def wait(self, signal, seconds=None):
        self.uses["wait"] += 1
        return signal.wait(None if seconds is None else seconds / self.pace)

    def join(self, thread, seconds=None):
        self.uses["join"] += 1
        thread.join(None if seconds is None else seconds / self.pace)
