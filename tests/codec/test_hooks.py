"""Hooks: any class travels as the user says, and what was done for a message can be undone."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import msgspec
import pytest
from msgspec.msgpack import Ext

from codec.payloads import forge, payload_of
from rankwire.codec import codec as codec_module
from rankwire.codec.codec import Codec
from rankwire.codec.hooks import TakeContext, UndoableBuffers, with_undos_of
from rankwire.codec.values import Code
from rankwire.errors import (
    ConfigurationError,
    FunctionNotFoundError,
    InvalidMessageError,
    MessageTooLargeError,
    UnsupportedTypeError,
)
from rankwire.texts import type_name


class Handle:
    """Something that stays where it is."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __eq__(self, other: object) -> bool:
        return type(other) is Handle and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


class Texts(list[str]):
    """A subclass of a builtin."""


def keyed(codec: Codec) -> Codec:
    codec.register(
        Handle, take=lambda handle, _: handle.key, build=lambda key, _: Handle(key), name="h"
    )
    return codec


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [1, None, "x", (1, 2), [b"y" * 9000, {3: Handle(4)}], Handle(5)])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"a": (1, x)}])
def test_an_instance_travels_as_what_take_returns(key, wrap):
    codec = keyed(Codec())
    value = wrap(Handle(key))
    assert codec.decode(payload_of(codec, value)) == value


def test_the_bytes_are_an_extension_of_name_and_state():
    codec = keyed(Codec())
    head = Ext(Code.HOOKED, msgspec.msgpack.encode(["h", 7]))
    assert Code.HOOKED == 32
    assert payload_of(codec, Handle(7)) == forge(head)


def test_both_ends_learn_the_peer():
    peers = []

    def take(handle: Handle, sending: Any) -> Any:
        peers.append(("to", sending.peer))
        return handle.key

    def build(key: Any, receiving: Any) -> Handle:
        peers.append(("from", receiving.peer))
        return Handle(key)

    codec = Codec()
    codec.register(Handle, take=take, build=build)
    codec.decode(payload_of(codec, Handle(1), peer=3), peer=2)
    codec.decode(payload_of(codec, Handle(1)))
    codec.encode_record([0, Handle(1)], ["a", "b"], peer=5)
    assert peers == [("to", 3), ("from", 2), ("to", None), ("from", None), ("to", 5)]


def test_functions_and_classes_can_have_hooks():
    known = {"sum": sum, "len": len}
    codec = Codec()
    codec.register(
        types.BuiltinFunctionType, take=lambda f, _: f.__name__, build=lambda name, _: known[name]
    )
    codec.register(type, take=lambda cls, _: cls.__name__, build=lambda name, _: {"int": int}[name])
    assert codec.decode(payload_of(codec, [sum, len, int])) == [sum, len, int]
    with pytest.raises(UnsupportedTypeError, match=r"value\[0\]: type function cannot be sent"):
        codec.encode([payload_of])


def test_a_hook_is_for_exactly_its_class():
    class Special(Handle):
        pass

    with pytest.raises(UnsupportedTypeError):
        keyed(Codec()).encode(Special(1))


def test_a_subclass_of_a_builtin_can_have_hooks():
    codec = Codec()
    codec.register(Texts, take=lambda texts, _: list(texts), build=lambda texts, _: Texts(texts))
    arrived = codec.decode(payload_of(codec, Texts(["a", "b"])))
    assert type(arrived) is Texts
    assert arrived == ["a", "b"]


def test_hooks_of_a_dataclass_go_before_its_fields():
    @dataclasses.dataclass
    class Point:
        x: int

    codec = Codec()
    codec.register(Point, take=lambda point, _: -point.x, build=lambda x, _: Point(-x), name="p")
    assert payload_of(codec, Point(-2)) == forge(Ext(32, msgspec.msgpack.encode(["p", 2])))
    assert codec.decode(payload_of(codec, Point(-2))) == Point(-2)


def test_hooks_go_before_pickle():
    codec = keyed(Codec(allow_pickle=True))
    assert codec.decode(payload_of(codec, Handle(1))) == Handle(1)
    assert payload_of(codec, Handle(1)) == payload_of(keyed(Codec()), Handle(1))


def test_instances_may_be_keys():
    codec = keyed(Codec())
    value = {Handle(number): number for number in range(2000)}
    assert codec.decode(payload_of(codec, value)) == value


# -- registering -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [int, str, type(None), list, dict, tuple, bytes, set])
def test_what_the_codec_looks_for_first_has_no_hooks(cls):
    with pytest.raises(ConfigurationError, match="its own encoding"):
        Codec().register(cls, take=lambda value, _: 1, build=lambda state, _: cls())


@pytest.mark.parametrize("hooks", [{"take": id}, {"build": id}, {"take": 1, "build": 2}])
def test_one_hook_is_not_enough(hooks):
    with pytest.raises(ConfigurationError, match="take= to send and build= to receive"):
        Codec().register(Handle, **hooks)


def test_repeating_a_registration_changes_nothing_and_other_hooks_are_refused():
    def take(handle: Handle, sending: TakeContext) -> Any:
        return handle.key

    def build(key: Any, receiving: Any) -> Handle:
        return Handle(key)

    codec = Codec()
    assert codec.register(Handle, take=take, build=build) is Handle
    codec.register(Handle, take=take, build=build)
    with pytest.raises(ConfigurationError, match="already"):
        codec.register(Handle, take=lambda handle, _: 1, build=build)
    with pytest.raises(ConfigurationError, match="already"):
        codec.register(Handle)


def test_register_with_hooks_is_a_decorator_too():
    codec = Codec()

    @codec.register(take=lambda one, _: None, build=lambda state, _: One())
    class One:
        pass

    assert type(codec.decode(payload_of(codec, One()))) is One


def test_without_hooks_an_error_says_how_to_have_them():
    with pytest.raises(ConfigurationError, match="take= and build="):
        Codec().register(Handle)
    with pytest.raises(UnsupportedTypeError, match="take= and build="):
        Codec().encode(Handle(1))


# -- errors ----------------------------------------------------------------------------------------


def failing(error: BaseException) -> Any:
    def hook(value: Any, way: Any) -> Any:
        raise error

    return hook


def test_an_error_of_take_refuses_the_value_with_its_path():
    codec = Codec()
    codec.register(Handle, take=failing(ValueError("it is\nbusy")), build=failing(KeyError()))
    with pytest.raises(UnsupportedTypeError) as caught:
        codec.encode({"a": [1, Handle(2)]}, path="args")
    assert caught.value.path == 'args["a"][1]'
    assert caught.value.type_name == type_name(Handle(1))
    assert "Its hook raised ValueError: it is busy" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_take_refuses_on_purpose_keeps_its_text():
    codec = Codec()
    codec.register(Handle, take=failing(ConfigurationError("not before Monday")), build=id)
    with pytest.raises(UnsupportedTypeError, match=r"cannot be sent. not before Monday$"):
        codec.encode(Handle(1))


def test_a_state_that_is_not_carried_is_found_in_the_path():
    codec = keyed(Codec())
    with pytest.raises(UnsupportedTypeError) as caught:
        codec.encode([Handle([1, object()])])
    assert caught.value.path == "value[0].state[1]"


def test_a_take_that_returns_its_own_value_is_nested_in_itself():
    codec = Codec()
    codec.register(Handle, take=lambda handle, _: handle, build=id)
    with pytest.raises(UnsupportedTypeError, match="nested more than 32 levels deep, or in itself"):
        codec.encode(Handle(1))


@pytest.mark.parametrize("error", [ValueError("bad \x1b[2J"), KeyError("x"), SystemExit(3)])
def test_an_error_of_build_refuses_the_message(error):
    codec = keyed(Codec())
    payload = payload_of(codec, [Handle(1)])
    other = Codec()
    other.register(Handle, name="h", take=id, build=failing(error))
    with pytest.raises(InvalidMessageError, match=f"building 'h' raised {type_name(error)}") as got:
        other.decode(payload)
    assert "\x1b" not in str(got.value)
    assert got.value.__cause__ is error


@pytest.mark.parametrize("error", [InvalidMessageError("no"), FunctionNotFoundError("f", ["g"])])
def test_what_build_refuses_on_purpose_keeps_its_text(error):
    payload = payload_of(keyed(Codec()), [Handle(1)])
    other = Codec()
    other.register(Handle, name="h", take=id, build=failing(error))
    with pytest.raises(InvalidMessageError) as caught:
        other.decode(payload)
    assert caught.value.message == error.message


@pytest.mark.parametrize(
    "body", [["h"], ["h", 1, 2], ["other", 1], [1, 1], [["h"], 1], {"h": 1}, "h", None, []]
)
def test_a_malformed_extension_is_refused(body):
    with pytest.raises(InvalidMessageError):
        keyed(Codec()).decode(forge(Ext(Code.HOOKED, msgspec.msgpack.encode(body))))


@pytest.mark.parametrize("code", [Code.ENUM, Code.RECORD])
def test_a_hooked_class_is_neither_enum_nor_record(code):
    head = Ext(code, msgspec.msgpack.encode(["h", "", [1]][: 2 if code == Code.ENUM else 3]))
    with pytest.raises(InvalidMessageError, match="no class is registered here as 'h'"):
        keyed(Codec()).decode(forge(head))


def test_states_nest_32_deep_and_no_deeper():
    codec = keyed(Codec())
    body: Any = 1
    for _ in range(32):
        body = Ext(Code.HOOKED, msgspec.msgpack.encode(["h", body]))
    codec.decode(forge(body))
    with pytest.raises(InvalidMessageError, match="32 levels"):
        codec.decode(forge(Ext(Code.HOOKED, msgspec.msgpack.encode(["h", body]))))


def test_in_long_heads_a_hooked_value_is_no_key_of_a_native_map():
    hidden = Ext(Code.HOOKED, msgspec.msgpack.encode(["h", 1]))
    head = b"\x92\xda\x08\x00" + b"x" * 2048 + b"\x81" + msgspec.msgpack.encode(hidden) + b"\x01"
    payload = bytearray(len(head).to_bytes(4, "little") + head)
    with pytest.raises(InvalidMessageError, match="an extension as a key of a native map"):
        keyed(Codec()).decode(payload)


# -- undoing ---------------------------------------------------------------------------------------


class Counting:
    """Counts who holds a handle, as a program would that counts its references."""

    def __init__(self) -> None:
        self.holds: list[Any] = []
        self.codec = Codec()
        self.codec.register(Handle, take=self.take, build=lambda key, _: Handle(key))

    def take(self, handle: Handle, sending: TakeContext) -> Any:
        self.holds.append(handle.key)
        sending.undo(lambda: self.holds.remove(handle.key))
        return handle.key


def test_what_take_did_is_undone_when_a_later_value_is_refused():
    counting = Counting()
    with pytest.raises(UnsupportedTypeError, match=r"value\[2\]"):
        counting.codec.encode([Handle(1), Handle(2), object()])
    assert counting.holds == []


def test_what_take_did_stays_when_the_message_is_encoded():
    counting = Counting()
    payload_of(counting.codec, [Handle(1), Handle(2)])
    assert counting.holds == [1, 2]


@pytest.mark.parametrize("odd", [2**70, {2**70: "\ud800"[:0]}, [2**70]])
def test_a_message_that_is_walked_twice_calls_take_once(odd):
    counting = Counting()
    value = [Handle(1), odd]
    assert counting.codec.decode(payload_of(counting.codec, value)) == value
    assert counting.holds == [1]


def test_a_head_that_is_too_long_is_undone(monkeypatch):
    counting = Counting()
    monkeypatch.setattr(codec_module, "_MAX_HEAD_NBYTES", 10)
    with pytest.raises(MessageTooLargeError):
        counting.codec.encode([Handle(1), "x" * 20])
    assert counting.holds == []


def test_an_interrupt_while_encoding_undoes():
    counting = Counting()
    counting.codec.register(Texts, take=failing(KeyboardInterrupt()), build=id)
    with pytest.raises(KeyboardInterrupt):
        counting.codec.encode([Handle(1), Texts()])
    assert counting.holds == []


def test_a_message_that_is_not_sent_can_be_undone_once():
    counting = Counting()
    message = counting.codec.encode([Handle(1), Handle(2)])
    counting.codec.undo(message)
    assert counting.holds == []
    counting.holds = [1, 2]
    counting.codec.undo(message)
    assert counting.holds == [1, 2]


def test_a_message_without_hooks_has_nothing_to_undo():
    codec = keyed(Codec())
    for value in (1, [1], [(1,)], b"x" * 9000):
        message = codec.encode(value)
        assert type(message[0]) is list
        codec.undo(message)


def test_undo_callbacks_run_in_reverse_order_even_if_one_raises():
    done = []

    def take(handle: Handle, sending: TakeContext) -> Any:
        sending.undo(lambda: done.append(handle.key))
        sending.undo(lambda: 1 // handle.key)
        return handle.key

    codec = Codec()
    codec.register(Handle, take=take, build=id)
    message = codec.encode([Handle(0), Handle(1), Handle(0)])
    with pytest.raises(ExceptionGroup, match="was not sent") as caught:
        codec.undo(message)
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError] * 2
    assert done == [0, 1, 0]


def test_a_copy_of_a_message_can_be_undone_in_its_place():
    done = []
    sending = TakeContext(1)
    sending.undo(lambda: done.append(1))
    copied = with_undos_of(UndoableBuffers([b"x"], sending), [b"y"])
    assert copied == [b"y"]
    Codec().undo((copied, 1))
    assert done == [1]
    plain = [b"z"]
    assert with_undos_of([b"x"], plain) is plain


def test_a_hook_may_leave_a_value_to_the_codec():
    codec = Codec()
    codec.register(
        Pair, take=lambda pair, _: NotImplemented if pair.left else 1, build=lambda _, __: "built"
    )
    with pytest.raises(UnsupportedTypeError):
        codec.encode([Pair(1)])  # the codec has no way of its own for it
    buffers, _ = codec.encode([Pair(0)])
    assert codec.decode(bytearray().join(buffers)) == ["built"]


class Pair:
    """The codec knows nothing of it."""

    def __init__(self, left: int) -> None:
        self.left = left
