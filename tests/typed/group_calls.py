"""Group calls: mypy knows the values of the ranks.

A line whose end says ``# error`` is one that mypy must refuse, in these words.
"""

from collections.abc import Iterator
from typing import Any, assert_type

from rankwire import GroupResult, RpcAgent


def add(a: int, b: int = 2) -> int:
    return a + b


async def later(text: str) -> list[str]:
    return [text]


def call(agent: RpcAgent) -> None:
    result = agent.call_all(add, 1, ranks=[0, 1], timeout=5, partial=True)
    assert_type(result, GroupResult[int])
    assert_type(result[1], int)
    assert_type(result.values, dict[int, int])
    assert_type(list(result), list[int])
    assert_type(agent.call_all(later, "a"), GroupResult[list[str]])
    assert_type(agent.call_all("add", 1, 2, anything=3), GroupResult[Any])
    assert_type(agent.call_all(add, 1, reduce="sum"), Any)
    assert_type(agent.call_all(add, 1, reduce=max), Any)
    assert_type(agent.as_completed(add, 1), Iterator[tuple[int, int]])
    agent.call_all(add, 1, need="all")  # error: No overload variant of "call_all"
    agent.call_all(add, 1, reduce=5)  # error: No overload variant of "call_all"


def call_by_proxy(agent: RpcAgent) -> None:
    everywhere = agent.to_all(ranks=range(3), timeout=5)
    assert_type(everywhere(add, 1), GroupResult[int])
    assert_type(everywhere(later, "a"), GroupResult[list[str]])
    assert_type(everywhere.add(1), GroupResult[Any])
    assert_type(agent.to_all(reduce="sum")(add, 1), int)
    assert_type(agent.to_all(reduce="sum", partial=True)(add, 1), GroupResult[int])
    everywhere(add, "a")  # error: No overload variant of "__call__" of "GroupFunctions"
