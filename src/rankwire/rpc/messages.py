"""Encode and decode requests and replies.

A request is the record ``[name, seconds left, chain, args, kwargs]``. The chain lists the calls
that this one is nested in, outermost first, as rank, name, rank, name ... A reply is ``[outcome,
value or details]``. An error travels as text, never as a class to look up.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from rankwire.codec.codec import Codec, unpacker_of
from rankwire.codec.hooks import with_undos_of
from rankwire.codec.values import PLAIN, is_flat
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    FunctionNotFoundError,
    InvalidMessageError,
    MessageTooLargeError,
    OverloadedError,
    RankwireError,
    RemoteError,
)
from rankwire.texts import class_name, one_line, printable, text_of, traceback_of, type_name
from rankwire.wire.frames import Buffer, Message

Chain = list[Any]  # rank, name, rank, name ...: as pairs it would take 3 us longer to encode

_MAX_TRACEBACK = 65536
MAX_REASON = 8192  # characters of the reason why a function cannot be called
_MAX_NAMES = 1000  # of registered functions
_MAX_BASES = 32  # of the class of an error
_MAX_NUMBER = 2**64  # a size or a rank; Python refuses to print very wide ones
_MAX_CHAIN_TEXT = 65536  # characters of all names; every nested call carries them
_REQUEST_PATHS = ("name", "timeout", "chain", "args", "kwargs")
_REPLY_PATHS = ("outcome", "result")
_TEXT = frozenset((str,))
_ATOMS = PLAIN | {bytes}


class Outcome(IntEnum):
    """How a call ended."""

    VALUE = 0
    RAISED = 1
    NOT_FOUND = 2
    BAD_REQUEST = 3
    OVERLOADED = 4
    CANCELLED = 5  # by itself, or by its caller, which then reads no reply
    TOO_LARGE = 6
    CLOSED = 7  # cut short because its agent closed
    EXPIRED = 8  # cut short because its deadline passed


class Request(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A decoded request."""

    name: str
    timeout: Any  # must be a float; msgspec would convert an int
    chain: list[Any]
    args: list[Any]
    kwargs: dict[str, Any]


class _Reply(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    outcome: int
    details: Any


# For small plain messages, msgspec checks the shape while it decodes, in C.
_unpack_request = unpacker_of(Request)
_unpack_reply = unpacker_of(_Reply)
_unpack_items = unpacker_of(list)


def encode_request(
    codec: Codec,
    name: str,
    timeout: float,
    chain: Chain,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    peer: int | None = None,
    max_nbytes: int = _MAX_NUMBER,
) -> Message:
    """Return a request's buffers and size, without copying arrays."""
    message: Message | None = None
    # Only the arguments need a check: the rest is plain. A tuple is encoded like a list.
    if (not args or PLAIN.issuperset(map(type, args))) and (not kwargs or is_flat(kwargs)):
        message = codec.encode_flat((name, timeout, chain, args, kwargs))
    if message is None:
        record = [name, timeout, chain, list(args), kwargs]
        message = codec.encode_record(record, _REQUEST_PATHS, levels=2, peer=peer)
    if message[1] > max_nbytes:
        codec.undo(message)
        raise MessageTooLargeError(message[1], max_nbytes)
    return message


def decode_request(codec: Codec, payload: bytearray, peer: int | None = None) -> Request:
    """Return the request in a payload, or raise ``InvalidMessageError``."""
    request = codec.decode(payload, _unpack_request, peer)
    if type(request) is not Request:
        request = _request_of(request)  # large or not plain: msgspec has not checked it
    timeout, chain = request.timeout, request.chain
    if type(timeout) is float and timeout >= 0.0 and (not chain or _is_chain(chain)):  # nor NaN
        return request
    raise _not_a_request()


def _request_of(record: Any) -> Request:
    if type(record) is list and len(record) == 5:
        name, _, chain, args, kwargs = record
        if (
            type(name) is str
            and type(chain) is list
            and type(args) is list
            and type(kwargs) is dict
            and _TEXT.issuperset(map(type, kwargs))
        ):
            return Request(*record)
    raise _not_a_request()


def _not_a_request() -> InvalidMessageError:
    return InvalidMessageError("a call is not of the form [name, timeout, chain, args, kwargs]")


def _is_chain(items: list[Any]) -> bool:
    is_one = [type(item) for item in items] == [int, str] * (len(items) // 2)
    return (
        is_one
        and max(items[::2]) < _MAX_NUMBER
        and min(items[::2]) >= 0
        and sum(map(len, items[1::2])) <= _MAX_CHAIN_TEXT
    )


def encode_result(codec: Codec, value: Any, peer: int | None = None) -> Message:
    """Return the reply that carries a function's result."""
    return codec.encode_record([0, value], _REPLY_PATHS, peer=peer)


def is_result(payload: Buffer) -> bool:
    """Return whether an encoded reply carries a function's result."""
    return bytes(payload[4:6]) == b"\x92\x00"  # a list of two items, the first of which is 0


def encode_items(codec: Codec, values: list[Any], peer: int) -> Message:
    """Return items of a stream as one message, without copying arrays."""
    message = codec.encode_flat(values) if _ATOMS.issuperset(map(type, values)) else None
    if message is None:
        message = codec.encode_record(values, ("item",) * len(values), peer=peer)
    return message


def decode_items(codec: Codec, payload: bytearray, src: int) -> list[Any]:
    """Return the items in a message of ``src``, or raise ``InvalidMessageError``."""
    items = codec.decode(payload, _unpack_items, src)
    if type(items) is not list or not items:
        raise InvalidMessageError("the items of a stream are not a list")
    return items


def copied(encoded: Message) -> Message:
    """Return the message with its buffers copied."""
    buffers, nbytes = encoded
    pieces: list[Buffer] = [
        piece if type(piece) is bytes else bytearray(piece) for piece in buffers
    ]
    return with_undos_of(buffers, pieces), nbytes


def encode_reply(codec: Codec, outcome: Outcome, details: Any = None) -> Message:
    """Return a reply other than a result; a long text is truncated."""
    if type(details) is str:
        details = _printable(details)
    return codec.encode_record([int(outcome), details], _REPLY_PATHS)


def encode_failure(codec: Codec, error: BaseException, longest: int | None = None) -> Message:
    """Return the reply for an error; with ``longest``, with short texts and no traceback."""
    if isinstance(error, MessageTooLargeError):
        return encode_reply(codec, Outcome.TOO_LARGE, [error.nbytes, error.limit])
    return encode_reply(codec, Outcome.RAISED, failure_details(error, longest))


def failure_details(error: BaseException, longest: int | None = None) -> list[Any]:
    """Return an error as a reply has it; with ``longest``, with short texts and no traceback."""
    # An error that came from another rank keeps its type and text, however many ranks it passes.
    if isinstance(error, RemoteError):
        kind, text, bases = error.remote_type, error.remote_message, list(error.remote_bases)
    else:
        kind, text, bases = type_name(error), text_of(error), _bases_of(error)
    if longest is None:
        trace = _printable(traceback_of(error, without_first=True))
        return [kind, _printable(text), trace, bases[:_MAX_BASES]]
    return [kind[:longest], _printable(text[:longest]), "", []]


def failure_of(details: Any, dst: int) -> RankwireError:
    """Return the error of which ``dst`` has sent the details."""
    return _error(Outcome.RAISED, details, dst, 0.0)


def _bases_of(error: BaseException) -> list[str]:
    if isinstance(error, RankwireError):
        return []
    bases = type(error).__mro__[1:]
    return [
        class_name(base) for base in bases if issubclass(base, Exception) and base is not Exception
    ]


def describe_error(error: BaseException) -> str:
    """Return an error's type and text, truncated as in a reply."""
    return _printable(f"{type_name(error)}: {text_of(error)}")


def decode_reply(codec: Codec, payload: bytearray, dst: int, limit: float) -> Any:
    """Return the value of a reply of ``dst``, or raise its error; ``limit`` is the timeout."""
    reply = codec.decode(payload, _unpack_reply, dst)
    if type(reply) is not _Reply:
        if type(reply) is not list or len(reply) != 2:
            raise InvalidMessageError("a reply is not of the form [outcome, value]")
        if type(reply[0]) is not int:
            raise InvalidMessageError("the outcome of a reply is not a number")
        reply = _Reply(*reply)
    if reply.outcome == 0:
        return reply.details
    raise _error(reply.outcome, reply.details, dst, limit)


def _error(outcome: int, details: Any, dst: int, limit: float) -> RankwireError:
    match outcome, details:
        case Outcome.RAISED, [str(kind), str(message), str(trace), list(bases)]:
            names = [one_line(item) for item in bases[:_MAX_BASES] if type(item) is str]
            texts = one_line(kind), _printable(message), _printable(trace)
            return RemoteError(*texts, remote_bases=names)
        case Outcome.NOT_FOUND, [str(name), list(known), str(reason)]:
            names = [one_line(item) for item in known[:_MAX_NAMES] if type(item) is str]
            return FunctionNotFoundError(
                one_line(name), names, reason=printable(reason, MAX_REASON)
            )
        case Outcome.BAD_REQUEST, str(reason):
            return InvalidMessageError(f"the callee could not read the call: {_printable(reason)}")
        case Outcome.OVERLOADED, str(reason):
            return OverloadedError(_printable(reason))
        case Outcome.TOO_LARGE, [int(nbytes), int(limit)] if (
            0 <= min(details) <= max(details) < _MAX_NUMBER
        ):
            return MessageTooLargeError(nbytes, limit)
        case Outcome.CLOSED, [str(reason), bool(began)]:
            closed = ChannelClosedError(_printable(reason))
            closed.may_have_run = began
            return closed
        case Outcome.EXPIRED, [str(detail), bool(began)]:
            late = DeadlineExceededError(limit, waiting_for=[dst], detail=_printable(detail))
            late.may_have_run = began
            late.is_explained = True
            return late
        case Outcome.CANCELLED, _:
            return RemoteError("CancelledError", "the callee cancelled the call", "")
        case _:
            return InvalidMessageError(f"a reply has the unknown outcome {outcome % _MAX_NUMBER}")


def _printable(text: str) -> str:
    return printable(text, _MAX_TRACEBACK)
