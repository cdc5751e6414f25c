"""The methods of ``RpcAgent`` that call a function on many ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar, overload

from rankwire.backends.arguments import Ranks, check_ranks
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError
from rankwire.rpc.agent_calls import AgentCalls
from rankwire.rpc.proxies import Later, RankFunctions, RemoteRank
from rankwire.services.group_result import GroupResult
from rankwire.services.group_run import ArgsOf, GroupCall, GroupRuns
from rankwire.services.group_tree import Combine, combiner

P = ParamSpec("P")
R = TypeVar("R")


class GroupFunctions(RankFunctions[GroupResult[Any]]):
    """The functions of many ranks; a call returns its ``GroupResult``. Safe from any thread."""

    __slots__ = ()

    @overload
    def __call__(self, function: str, /, *args: Any, **kwargs: Any) -> GroupResult[Any]: ...
    @overload
    def __call__(
        self, function: Callable[P, Later[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> GroupResult[R]: ...
    @overload
    def __call__(
        self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> GroupResult[R]: ...
    def __call__(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, as ``call_all`` does."""
        return self._make_call(function, args, kwargs)


class AgentGroupCalls(AgentCalls):
    """The methods of ``RpcAgent`` for group calls. Safe from any thread."""

    _groups: GroupRuns

    @overload
    def call_all(
        self,
        function: str,
        /,
        *args: Any,
        ranks: Ranks = None,
        timeout: float | None = None,
        reduce: None = None,
        need: int | None = None,
        collect: Ranks = None,
        partial: bool = False,
        **kwargs: Any,
    ) -> GroupResult[Any]: ...
    @overload
    def call_all(
        self,
        function: Callable[..., Later[R]],
        /,
        *args: Any,
        ranks: Ranks = None,
        timeout: float | None = None,
        reduce: None = None,
        need: int | None = None,
        collect: Ranks = None,
        partial: bool = False,
        **kwargs: Any,
    ) -> GroupResult[R]: ...
    @overload
    def call_all(
        self,
        function: Callable[..., R],
        /,
        *args: Any,
        ranks: Ranks = None,
        timeout: float | None = None,
        reduce: None = None,
        need: int | None = None,
        collect: Ranks = None,
        partial: bool = False,
        **kwargs: Any,
    ) -> GroupResult[R]: ...
    @overload
    def call_all(
        self,
        function: Any,
        /,
        *args: Any,
        ranks: Ranks = None,
        timeout: float | None = None,
        reduce: str | Combine,
        need: int | None = None,
        collect: Ranks = None,
        partial: bool = False,
        **kwargs: Any,
    ) -> Any: ...
    def call_all(
        self,
        function: Any,
        /,
        *args: Any,
        ranks: Any = None,
        timeout: Any = None,
        reduce: Any = None,
        need: Any = None,
        collect: Any = None,
        partial: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Call a function on many ranks at once, and return what they return.

        More than 8 ranks are called along a tree: the arguments are encoded once, and passed on as
        they were received. The function runs at most once on each rank. These settings are never
        arguments of the function: if that has parameters of these names, use ``to_all``.

        Args:
            function: A name registered there, or a function registered here under the same name.
            *args: Positional arguments, the same for all ranks.
            ranks: The ranks to call, each once, or names, such as ``"rollout"``; None is all ranks,
                this one included.
            timeout: Seconds for all of it; None is the agent's timeout.
            reduce: ``"sum"``, ``"mean"``, ``"prod"``, ``"max"``, ``"min"``, or a function of two
                values: return the combined value. The order in which the values are combined
                depends only on the list of ranks.
            need: Return when so many ranks have succeeded, and cancel the others.
            collect: Only these ranks send their values; the others only say that they are done.
            partial: Whether to return the ``GroupResult`` also if ranks failed or did not answer;
                with ``reduce`` too, its ``value`` is made of the values that there are.
            **kwargs: Keyword arguments, the same for all ranks.

        Raises:
            GroupCallError: A rank failed or did not answer in time; with ``need``, too many. It has
                the ``values``, ``errors`` and ``missing`` ranks.
            CircularCallError: As for ``rpc_sync``, and so are ``CallCancelledError``,
                ``UnsupportedTypeError`` and ``ConfigurationError``.
        """
        given = {
            "ranks": ranks,
            "timeout": timeout,
            "reduce": reduce,
            "need": need,
            "collect": collect,
            "partial": partial or None,
        }
        self._check_keywords(function, given)
        return self.to_all(
            ranks=ranks,
            timeout=timeout,
            reduce=reduce,
            need=need,
            collect=collect,
            partial=partial,
        )(function, *args, **kwargs)

    @overload
    def to_all(
        self,
        *,
        ranks: Ranks = None,
        timeout: float | None = None,
        reduce: None = None,
        need: int | None = None,
        collect: Ranks = None,
        partial: bool = False,
        args_of: ArgsOf | None = None,
    ) -> GroupFunctions: ...
    @overload
    def to_all(
        self,
        *,
        ranks: Ranks = None,
        timeout: float | None = None,
        reduce: str | Combine,
        need: int | None = None,
        partial: Literal[False] = False,
        args_of: ArgsOf | None = None,
    ) -> RemoteRank: ...
    @overload
    def to_all(
        self,
        *,
        ranks: Ranks = None,
        timeout: float | None = None,
        reduce: str | Combine,
        need: int | None = None,
        partial: Literal[True],
        args_of: ArgsOf | None = None,
    ) -> GroupFunctions: ...
    def to_all(
        self,
        *,
        ranks: Any = None,
        timeout: float | None = None,
        reduce: Any = None,
        need: int | None = None,
        collect: Any = None,
        partial: bool = False,
        args_of: ArgsOf | None = None,
    ) -> Any:
        """Return a proxy like ``to`` does; its calls are group calls, as ``call_all`` makes them.

        Args:
            ranks: As for ``call_all``, and so are the others.
            timeout: Seconds for each group call.
            reduce: How to combine the values.
            need: How many ranks have to succeed.
            collect: The ranks that send their values.
            partial: Whether a failure is part of the result.
            args_of: Returns further positional arguments for a rank, as a tuple, so that each rank
                gets its own.

        Raises:
            ConfigurationError: An argument is invalid.
        """
        size, roles = self.backend.world_size, self.backend.roles
        members = check_ranks(ranks, size, roles)
        if need is not None and not (type(need) is int and 1 <= need <= len(members)):
            raise ConfigurationError(f"need is a number from 1 to {len(members)}, not {need!r}")
        if reduce is not None:
            combiner(reduce)
        wanted = None if collect is None else check_ranks(collect, size, roles)
        if wanted is not None:
            if reduce is not None or need is not None or args_of is not None:
                raise ConfigurationError("collect= goes with none of reduce=, need= and args_of=")
            if strangers := [rank for rank in wanted if rank not in members]:
                raise ConfigurationError(f"collect= has rank {strangers[0]}, which is not called")
        limit = self.timeout if timeout is None else Deadline(timeout, self._clock).limit

        def call_all(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name, deadline, call = self._prepare(function, limit)
            settings = members, reduce, need, wanted, partial, args_of
            return self._groups.run(GroupCall(*settings, name, args, kwargs, deadline, call))

        description = f"{len(members)} ranks, each call within {limit:g} s"
        return (RemoteRank if reduce and not partial else GroupFunctions)(call_all, description)

    @overload
    def as_completed(
        self,
        function: str,
        /,
        *args: Any,
        ranks: Ranks = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]: ...
    @overload
    def as_completed(
        self,
        function: Callable[..., Later[R]],
        /,
        *args: Any,
        ranks: Ranks = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Iterator[tuple[int, R]]: ...
    @overload
    def as_completed(
        self,
        function: Callable[..., R],
        /,
        *args: Any,
        ranks: Ranks = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Iterator[tuple[int, R]]: ...
    def as_completed(
        self,
        function: Any,
        /,
        *args: Any,
        ranks: Ranks = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Call a function on many ranks at once; yield each rank with its value, as they come.

        The calls begin at once. If the iterator is closed or dropped, the others are cancelled.

        Args:
            function: As for ``call_all``, and so are the other arguments.
            *args: Positional arguments, the same for all ranks.
            ranks: The ranks to call.
            timeout: Seconds for all of it.
            **kwargs: Keyword arguments, the same for all ranks.

        Raises:
            GroupCallError: From the loop, after all values: the ranks that failed or did not
                answer in time. Otherwise as ``call_all``.
        """
        self._check_keywords(function, {"ranks": ranks, "timeout": timeout})
        limit = self.timeout if timeout is None else Deadline(timeout, self._clock).limit
        members = check_ranks(ranks, self.backend.world_size, self.backend.roles)
        name, deadline, call = self._prepare(function, limit)
        settings = members, None, None, None, False, None
        return self._groups.start(GroupCall(*settings, name, args, kwargs, deadline, call))

    def _check_keywords(self, function: Any, given: dict[str, Any]) -> None:
        name = function if type(function) is str else self._registry.name_of(function)
        for keyword, value in given.items():
            if value is not None:
                self._registry.check_keyword(name, keyword, "to_all(")
