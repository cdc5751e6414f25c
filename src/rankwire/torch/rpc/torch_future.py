"""The future of a call, as torch's programs know futures.

It is a ``torch.futures.Future``, so callbacks, ``collect_all`` and ``wait_all`` work, and it ends
when the future of rankwire's call does. A thread that waits in ``wait()`` reads the connection
itself, as that one does.

An error that is raised belongs to the future, and its traceback has the frames that it came
through. If one of these had the future, that would be a circle through C++, which no collector
sees, and all that the frames of the caller hold would be kept. So none of ours has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rankwire.rpc.future import RpcFuture
from rankwire.torch.rpc.torch_errors import translated

if TYPE_CHECKING:
    from rankwire.torch.rpc.session import Session


class CallFuture(torch.futures.Future[Any]):  # type: ignore[misc]
    """The result of ``rpc_async``. Safe from any thread.

    Args:
        session: Knows how errors are told.
        call: The future of the call.
        rank: Who was called.
        limit: The seconds that the call has.

    Attributes:
        call: As given.
    """

    def __init__(self, session: Session, call: RpcFuture[Any], rank: int, limit: float) -> None:
        super().__init__()
        self.call = call
        self._session = session
        self._rank = rank
        self._limit = limit
        self._unfinished = [True]  # who pops it ends this future
        call.when_ended(self._finish)
        session.attendant.watch(call)

    def wait(self) -> Any:
        """Return the value, or raise the call's error."""
        if self._unfinished:
            attendant = self._session.attendant
            try:
                attendant.begin_reading(self._rank)
                self.call.result()
            except Exception as error:  # it is told in the words of torch, below
                error.__traceback__ = None
            finally:
                try:
                    attendant.end_reading()
                except BaseException:
                    attendant.end_reading()  # an interrupt has fallen into the first
                    raise
            self._finish(self.call)
        try:
            return super(torch.futures.Future, self).wait()  # of which there is no frame
        finally:
            del self

    def done(self) -> bool:
        """Whether there is a value or an error."""
        self._attend()
        return super().done()  # type: ignore[no-any-return]

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Return a future of what ``callback(self)`` returns when this one is done."""
        self._attend()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(self)`` when this is done, in whatever thread that happens."""
        self._attend()
        super().add_done_callback(callback)

    def _attend(self) -> None:
        """Have the reply read although no thread waits for it."""
        if self._unfinished:
            self.call.attend()

    def _finish(self, call: RpcFuture[Any]) -> None:
        """End with what the call has ended with; whoever comes second leaves it to the first."""
        try:
            self._unfinished.pop()
        except IndexError:
            return
        try:
            value = call.result()
        except Exception as error:
            error.__traceback__ = None
            self.set_exception(translated(error, self._session, self._rank, self._limit))
        else:
            self.set_result(value)
