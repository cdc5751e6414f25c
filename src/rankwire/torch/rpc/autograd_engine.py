"""Run backward passes over several ranks, and end contexts.

The rank that calls ``backward`` conducts the pass. First it asks rank after rank which messages the
gradients reach (a round of calls for each hop); torch's engine skips this step, and hangs if a
result was not used. Then all these ranks run their parts in parallel (``autograd_pass``).

The first part that fails ends the pass on all ranks, and the error names its rank. A rank whose
conductor is lost cancels its part. There are no second derivatives across ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import Tensor

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import PeerLostError, RankwireError, RemoteError
from rankwire.rpc.agent import Agent
from rankwire.torch.rpc.autograd_contexts import COUNTER_BITS, Context, Contexts
from rankwire.torch.rpc.autograd_pass import Gradients, LocalPass
from rankwire.torch.rpc.verbs import ADOPT, ARRIVE, END, FAIL, REACH, RUN, register, sender

_GRACE = 1.0
_MOST_PASSES = 1024  # in progress in one context


class Engine:
    """Conducts passes, serves those of other ranks, and ends contexts. Safe from any thread."""

    def __init__(self, agent: Agent, contexts: Contexts, time_limit: Callable[[], float]) -> None:
        self._agent = agent
        self.rank = agent.rank
        self.contexts = contexts
        self._time_limit = time_limit
        self._numbers = itertools.count()
        self._threads: dict[runtime.Thread, None] = {}
        register(
            agent,
            {
                REACH: self._serve_reach,
                RUN: self._serve_run,
                ARRIVE: self._serve_arrive,
                FAIL: self._serve_fail,
                END: self._serve_end,
                ADOPT: self._serve_adopt,
            },
        )
        self._unwatch = agent.backend.on_peer_lost(self._lost)

    def close(self) -> None:
        """Cancel all passes, and drop all contexts."""
        self._unwatch()
        for context in self.contexts.all():
            self._drop(context, RuntimeError("RPC was shut down during a backward pass"))
        for thread in list(self._threads):  # they end, unless a user's function hangs
            self._agent.backend.clock.join(thread, _GRACE)

    def end(self, number: int) -> None:
        """End a context here and on all ranks that this rank called in it."""
        context = self.contexts.get(number)
        if context is not None:
            self._drop(context, RuntimeError(f"autograd context {number} has ended"))
            for peer in tuple(context.peers - {self.rank}):
                self.notify(peer, END, number)

    def _drop(self, context: Context, reason: Exception) -> None:
        self.contexts.end(context.id)
        for part in list(context.passes.values()):
            part.fail(reason)

    def _lost(self, error: PeerLostError) -> None:
        for context in self.contexts.lose(error.peer):
            if context.maker == error.peer:
                self._drop(context, error)
            elif context.maker != self.rank and context.maker not in context.callers:
                self._ask_for_end(context)
        for context in self.contexts.all():
            for number, part in list(context.passes.items()):
                if number >> COUNTER_BITS == error.peer:
                    part.fail(error)
                    context.passes.pop(number, None)

    def _ask_for_end(self, context: Context) -> None:
        """Ask a context's creator to notify this rank of the end, in place of a lost rank."""

        def end_unless_adopted(asked: Future[bool]) -> None:
            if asked.cancelled() or asked.exception() is not None or not asked.result():
                self.end(context.id)

        try:
            asked = self._agent.rpc_async(context.maker, ADOPT, context.id)
        except RankwireError:  # there is no such rank, or it is lost
            self.end(context.id)
        else:
            asked.add_done_callback(end_unless_adopted)

    def backward(self, context: Context, roots: Sequence[Tensor], *, retain_graph: bool) -> None:
        """Conduct a pass until it ends on all ranks; an error names the failed rank."""
        deadline = Deadline(self._time_limit() or math.inf, self._agent.backend.clock)
        number = (self.rank << COUNTER_BITS) + next(self._numbers)
        own = self._open(context, number, deadline, roots)
        conducted = _Conducted(self, context.id, number, own)
        try:
            conducted.reach(deadline)
            conducted.run(deadline, retain_graph=retain_graph)
        except BaseException as error:
            conducted.fail(self.rank, error)
            conducted.end(is_interrupt=not isinstance(error, Exception))
            raise conducted.explained(error) from error
        finally:
            context.passes.pop(number, None)

    def _open(
        self, context: Context, number: int, deadline: Deadline, roots: Sequence[Tensor] = ()
    ) -> LocalPass:
        def deliver(peer: int, message: int, gradients: Gradients) -> Future[None] | None:
            if peer == self.rank:
                part.arrive(message, gradients)
                return None
            return self.call(peer, deadline, ARRIVE, context.id, number, message, list(gradients))

        context.passes[number] = part = LocalPass(context, deliver, roots)
        return part

    def call(self, rank: int, deadline: Deadline, name: str, *args: Any) -> Future[Any]:
        """Call a verb on another rank as part of a pass."""
        called = self._agent.rpc_async(rank, name, *args, timeout=deadline.remaining())
        called.disregard()  # only the first failure of a pass is raised
        return called

    def notify(self, rank: int, name: str, *args: Any) -> None:
        """Call a verb on a rank that may be lost, and ignore the outcome."""
        self._agent.rpc_async(rank, name, *args).disregard()

    def _serve_end(self, number: int) -> None:
        src = sender()
        context = self.contexts.get(number)
        if context is None:
            if type(number) is not int or number.bit_length() > 64:
                raise ValueError("the id of a context has 64 bits")
            # The call that introduces the context may still be in flight.
            self.contexts.end_for(number, src)
            return
        if src != context.maker and (context.maker == self.rank or src not in context.callers):
            raise PermissionError(f"rank {src} cannot end a context of rank {context.maker}")
        self.end(number)

    def _serve_adopt(self, number: int) -> bool:
        if number >> COUNTER_BITS != self.rank:
            raise PermissionError(f"rank {self.rank} did not make context {number}")
        context = self.contexts.get(number)
        return context is not None and context.enlist(sender())

    def _serve_reach(self, context_id: int, number: int, messages: list[int]) -> list[Any]:
        _check_conductor(number)
        context = self.contexts.find(context_id)
        part = context.passes.get(number)
        if part is None:
            if len(context.passes) >= _MOST_PASSES:
                raise RuntimeError(
                    f"{_MOST_PASSES} backward passes are in progress in this context"
                )
            part = self._open(context, number, Deadline(math.inf, self._agent.backend.clock))
        return part.reach_from(messages)

    def _serve_run(self, context_id: int, number: int, retain_graph: bool) -> Future[None]:
        _check_conductor(number)
        context = self.contexts.find(context_id)
        part = context.passes[number]
        over: Future[None] = Future()
        over.add_done_callback(
            lambda done: part.fail(RuntimeError("was given up")) if done.cancelled() else None
        )

        def run() -> None:
            outcome: BaseException | None = None
            try:
                part.run(retain_graph=retain_graph)
            except BaseException as error:  # raised by a user's function: passed to the caller
                outcome = error
            context.passes.pop(number, None)
            self._threads.pop(runtime.current_thread(), None)
            if over.set_running_or_notify_cancel():
                over.set_exception(outcome) if outcome else over.set_result(None)

        # Not a worker: it waits for other calls, which may need all of the agent's workers.
        thread = runtime.Thread(target=run, name="rankwire-backward", daemon=True)
        self._threads[thread] = None
        thread.start()
        return over

    def _serve_arrive(
        self, context_id: int, number: int, message: int, gradients: list[Tensor | None]
    ) -> None:
        context = self.contexts.find(context_id)
        if (src := sender()) != context.message(message)[0]:
            raise PermissionError(f"message {message} was not for rank {src}")
        part = context.passes.get(number)
        if part is not None:  # else it has failed
            part.arrive(message, gradients)

    def _serve_fail(self, context_id: int, number: int, reason: str) -> None:
        _check_conductor(number)
        context = self.contexts.get(context_id)
        part = context.passes.pop(number, None) if context else None
        if part is not None:
            part.fail(RuntimeError(reason))


class _Conducted:
    def __init__(self, engine: Engine, context: int, number: int, own: LocalPass) -> None:
        self._engine = engine
        self._context = context
        self._number = number
        self._own = own
        self._ranks: set[int] = set()  # the other ranks in the pass
        self._parts: dict[int, Future[None]] = {}
        self._lock = runtime.Lock()
        self._failure: tuple[int, BaseException] | None = None

    def reach(self, deadline: Deadline) -> None:
        found = self._own.reach_from_roots()
        while found:
            messages: dict[int, list[int]] = {}
            for rank, message in found:
                messages.setdefault(rank, []).append(message)
            own = messages.pop(self._engine.rank, ())
            self._ranks |= messages.keys()
            asked = {
                rank: self._engine.call(rank, deadline, REACH, self._context, self._number, numbers)
                for rank, numbers in messages.items()
            }
            found = self._own.reach_from(own)
            for rank, answer in asked.items():
                try:
                    found += [(rank, message) for rank, message in answer.result()]
                except Exception as error:
                    self.fail(rank, error)
                    raise

    def run(self, deadline: Deadline, *, retain_graph: bool) -> None:
        for rank in self._ranks:
            self._parts[rank] = part = self._engine.call(
                rank, deadline, RUN, self._context, self._number, retain_graph
            )
            part.add_done_callback(partial(self._over, rank))
        self._own.run(retain_graph=retain_graph)
        for part in self._parts.values():
            part.result()

    def _over(self, rank: int, part: Future[None]) -> None:
        if not part.cancelled() and (error := part.exception()) is not None:
            self.fail(rank, error)

    def fail(self, rank: int, error: BaseException) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = rank, error
        self._own.fail(error)
        reason = f"the backward pass failed on rank {rank}: {error}"
        for other in self._ranks - {rank}:
            self._engine.notify(other, FAIL, self._context, self._number, reason)

    def end(self, *, is_interrupt: bool) -> None:
        for part in self._parts.values():
            if is_interrupt:
                part.cancel()
            else:
                part.exception()

    def explained(self, error: BaseException) -> BaseException:
        assert self._failure is not None
        rank, cause = self._failure
        if not isinstance(error, Exception) or not self._ranks:
            return error  # an interrupt, or no other rank takes part
        text = cause.remote_message if isinstance(cause, RemoteError) else cause
        told = RuntimeError(f"Error on Node {rank}: {text}")
        told.__cause__ = cause
        return told


def _check_conductor(number: int) -> None:
    if (src := sender()) != number >> COUNTER_BITS:
        raise PermissionError(f"rank {src} does not conduct this backward pass")
