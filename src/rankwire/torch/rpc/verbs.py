"""The requests between ranks beyond calls of the program's functions, and their allowed senders.

Each verb checks its sender first; ``SENDERS`` says which ones it accepts:

- *Holder*: has a handle of the object, proved by the key in its id (63 random bits), even before
  the rank that passed it on has notified the owner.
- *Creator*: the rank in the object's id. *Conductor*: the rank in the number of the backward pass.
- *Member*: knows the context's id, of which 48 bits are random.

``docs/security-details.md`` has the same table; ``test_rpc_verbs.py`` checks both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rankwire.rpc.agent import Agent
from rankwire.rpc.call import current_call

APPLY = "torch.rpc apply"
GATHER = "torch.rpc gather"

MAKE = "torch.rpc make"
MAKE_BY_METHOD = "torch.rpc make by method"
FETCH = "torch.rpc fetch"
CALL = "torch.rpc call"
CHECK = "torch.rpc check"
TYPE = "torch.rpc type"
BACKWARD = "torch.rpc backward"
TELL = "torch.rpc tell"

CALL_IN_CONTEXT = "rankwire.torch.autograd:call"
REACH = "rankwire.torch.autograd:reach"
RUN = "rankwire.torch.autograd:run"
ARRIVE = "rankwire.torch.autograd:arrive"
FAIL = "rankwire.torch.autograd:fail"
END = "rankwire.torch.autograd:end"
ADOPT = "rankwire.torch.autograd:adopt"

SENDERS = {
    APPLY: "any worker; the rule for names decides what it runs",
    GATHER: "a participating worker, to the first participant",
    MAKE: "the creator of the new object",
    MAKE_BY_METHOD: "the creator of the new object, if it holds the other one",
    FETCH: "a holder",
    CALL: "a holder",
    CHECK: "a holder",
    TYPE: "a holder",
    BACKWARD: "a holder, in a context that it is a member of",
    TELL: "a holder, of its own handles; the creator, of an object that was not made",
    CALL_IN_CONTEXT: "a member; the rule for names decides what it runs",
    REACH: "the conductor of the pass",
    RUN: "the conductor of the pass",
    ARRIVE: "the rank that the message was sent to",
    FAIL: "the conductor of the pass",
    END: "the maker of the context, or a rank that has called this one in it",
    ADOPT: "a member, to the maker of the context",
}


def register(agent: Agent, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Register verbs of ``SENDERS`` with an agent; each function checks its ``sender()``."""
    for verb, function in functions.items():
        assert verb in SENDERS, verb
        agent.register(verb, function)


def sender() -> int:
    """Return the sender of the verb that this thread serves; raise if it was called locally."""
    call = current_call()
    if call is None:
        raise PermissionError("only other ranks can call this")
    return call.src
