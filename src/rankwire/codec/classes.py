"""The classes that users register with a codec: enums, records, and any class with hooks.

A codec has a table of its own, and all codecs of a process share one (``message``). The wire names
a class by its registered name and never by a path to import, so a message reaches no other class.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from enum import Enum, Flag
from typing import Any, TypeAlias, TypeVar, overload

import msgspec

from rankwire.codec.hooks import Build, BuildContext, HookedClass, Take, TakeContext
from rankwire.codec.values import BUILT_IN
from rankwire.errors import ConfigurationError, InvalidMessageError

T = TypeVar("T")

# An instance of a subclass of these holds more than its fields.
_BUILTINS = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)

# A flag class caches every combination in a dict by value. With more bits, a sender could choose
# many values of one hash.
_MAX_FLAG_BITS = 64


class EnumClass:
    """A registered enum. A member travels by name, a flag by value: combinations have no name."""

    def __init__(self, name: str, cls: type[Enum]) -> None:
        self.name = name
        self.cls = cls
        self._is_flag = issubclass(cls, Flag)
        if self._is_flag:
            self._named = frozenset(member.value for member in cls.__members__.values())

    def key_of(self, member: Enum) -> Any:
        """Return what stands for a member on the wire, or raise ``ValueError`` with advice."""
        if not self._is_flag:
            return member.name
        if not self._carries(member.value):
            raise ValueError(
                f"Combined flags have at most {_MAX_FLAG_BITS} bits: send value.value."
            )
        return member.value

    def member_of(self, key: Any) -> Enum:
        """Return the member for a received key."""
        try:
            if not self._is_flag:
                return self.cls.__members__[key]
            if type(key) is int and self._carries(key):
                return self.cls(key)
        except Exception as error:
            raise InvalidMessageError(f"enum {self.name!r} has no such member") from error
        raise InvalidMessageError(f"enum {self.name!r} has no such member")

    def _carries(self, value: int) -> bool:
        return value in self._named or value.bit_length() <= _MAX_FLAG_BITS


class RecordClass:
    """A registered dataclass, namedtuple or Struct; the receiver calls its constructor."""

    def __init__(self, name: str, cls: type[Any], fields: dict[str, bool]) -> None:
        """Describe a class by its fields, each with whether the constructor takes it."""
        self.name = name
        self.cls = cls
        self.fields = tuple(fields)
        # Sent too, so that ranks with different versions of a class do not mix up its fields.
        self.signature = ",".join(fields)
        self._set_later = [field for field, in_constructor in fields.items() if not in_constructor]
        try:
            inspect.signature(cls).bind(**{f: None for f in fields if f not in self._set_later})
        except TypeError as error:
            raise ConfigurationError(
                f"{cls.__qualname__} cannot be built from its fields alone: {error}"
            ) from error

    def values_of(self, record: Any) -> list[Any]:
        """Return the values of all fields in order; raise ``AttributeError`` if one is not set."""
        return [getattr(record, field) for field in self.fields]

    def build(self, values: Any) -> Any:
        """Build an instance from the received values of :attr:`fields`."""
        if type(values) is not list or len(values) != len(self.fields):
            raise InvalidMessageError(f"not the values of the fields of {self.name!r}")
        arguments = dict(zip(self.fields, values, strict=True))
        later = [(field, arguments.pop(field)) for field in self._set_later]
        try:
            record = self.cls(**arguments)
            for field, value in later:
                object.__setattr__(record, field, value)  # works on frozen dataclasses as well
        except Exception as error:
            raise InvalidMessageError(
                f"the constructor of {self.name!r} raised {type(error).__name__}"
            ) from error
        return record


Carried: TypeAlias = EnumClass | RecordClass | HookedClass


class ClassTable:
    """Registered classes by class, to encode, and by name, to decode; ``shared`` is a fallback.

    Registering is safe while other threads look up classes: each table changes by one assignment.
    """

    def __init__(self, shared: ClassTable | None = None) -> None:
        self._by_class: dict[type, Carried] = {}
        self._by_name: dict[str, Carried] = {}
        self._shared = shared

    def of_class(self, cls: type) -> Carried | None:
        """Return how instances of a class are sent, or None if they cannot be sent."""
        carried = self._by_class.get(cls)
        if carried is None and self._shared is not None:
            carried = self._shared._by_class.get(cls)
            if carried is not None and carried.name in self._by_name:
                return None  # this table has another class of that name
        return carried

    def registered(self, cls: type) -> Carried | None:
        """Return what was registered for a class in this table, without the fallback."""
        return self._by_class.get(cls)

    def of_name(self, name: Any) -> Carried | None:
        """Return what is registered under a name from the wire."""
        carried = self._by_name.get(name)
        if carried is None and self._shared is not None:
            return self._shared._by_name.get(name)
        return carried

    def parts_of(self, value: Any) -> list[Any] | None:
        """Return the values of the fields of a registered record; None for other values."""
        carried = self.of_class(type(value))
        return carried.values_of(value) if isinstance(carried, RecordClass) else None

    def add(
        self, cls: type, name: str | None, take: Take | None = None, build: Build | None = None
    ) -> None:
        """Register a class, with or without hooks; repeating a registration changes nothing."""
        if not isinstance(cls, type):
            raise ConfigurationError(f"only a class can be registered, not {cls!r}")
        if cls in BUILT_IN:
            raise ConfigurationError(
                f"{cls.__qualname__} cannot be registered: the codec has its own encoding of it"
            )
        name = cls.__qualname__ if name is None else name
        known = self.of_class(cls)
        if known is not None and known.name == name and _hooks_of(known) == (take, build):
            return
        if known is not None:
            raise ConfigurationError(f"{cls.__qualname__} is registered already, as {known.name!r}")
        if self.of_name(name) is not None:
            raise ConfigurationError(f"another class is registered as {name!r}; pass name=")
        is_plain = take is None and build is None
        carried = _carried(name, cls) if is_plain else _hooked(name, cls, take, build)
        self._by_name[name] = carried
        self._by_class[cls] = carried

    def forget_former(self, cls: type, name: str) -> None:
        """Forget the class that this one redefines, as when a notebook cell runs again."""
        former = self._by_name.get(name)
        if former is None or former.cls is cls:
            return
        here, there = (cls.__module__, cls.__qualname__), former.cls
        if (there.__module__, there.__qualname__) == here:
            del self._by_class[former.cls], self._by_name[name]


SHARED = ClassTable()


def _hooks_of(carried: Carried) -> tuple[Take | None, Build | None]:
    return (carried.take, carried.build_hook) if isinstance(carried, HookedClass) else (None, None)


def _hooked(name: str, cls: type, take: Take | None, build: Build | None) -> HookedClass:
    if not callable(take) or not callable(build):
        raise ConfigurationError(
            f"{cls.__qualname__} needs two functions as hooks: take= to send and build= to receive"
        )
    return HookedClass(name, cls, take, build)


def is_namedtuple(cls: type) -> bool:
    """Return whether ``collections.namedtuple`` or ``typing.NamedTuple`` made a class."""
    return issubclass(cls, tuple) and type(getattr(cls, "_fields", None)) is tuple


def _carried(name: str, cls: type[Any]) -> EnumClass | RecordClass:
    if issubclass(cls, Enum):
        return EnumClass(name, cls)
    if is_namedtuple(cls):
        return RecordClass(name, cls, dict.fromkeys(cls._fields, True))
    if not issubclass(cls, _BUILTINS):
        if issubclass(cls, msgspec.Struct):
            return RecordClass(name, cls, dict.fromkeys(cls.__struct_fields__, True))
        if dataclasses.is_dataclass(cls):
            return RecordClass(name, cls, {f.name: f.init for f in dataclasses.fields(cls)})
    raise ConfigurationError(
        f"{cls.__qualname__} cannot be registered as it is: only enums, namedtuples, dataclasses"
        " and msgspec Structs that are not also builtin containers; for any other class pass take="
        " and build="
    )


@overload
def message(
    cls: type[T],
    *,
    name: str | None = None,
    take: Callable[[T, TakeContext], Any] | None = None,
    build: Callable[[Any, BuildContext], T] | None = None,
) -> type[T]: ...
@overload
def message(
    cls: None = None,
    *,
    name: str | None = None,
    take: Callable[[Any, TakeContext], Any] | None = None,
    build: Callable[[Any, BuildContext], Any] | None = None,
) -> Callable[[type[T]], type[T]]: ...
def message(
    cls: type[T] | None = None,
    *,
    name: str | None = None,
    take: Callable[[Any, TakeContext], Any] | None = None,
    build: Callable[[Any, BuildContext], Any] | None = None,
) -> Any:
    """Let instances of a class be sent, in calls and object collectives.

    A decorator, with or without arguments: it registers the class with every ``Codec`` of this
    process. All ranks must register it, under the same name. Safe from any thread.

    Args:
        cls: A dataclass, enum, namedtuple or msgspec Struct; with hooks any class.
        name: Its name on the wire; by default its qualified name. A class that is defined again
            replaces the former one.
        take: Returns what is sent in place of an instance, as for ``Codec.register``.
        build: Returns an instance, made of what ``take`` returned.

    Returns:
        The class itself, or a decorator.

    Raises:
        ConfigurationError: The class needs hooks, its name is taken, or one hook is missing.
    """
    if cls is None:
        return lambda cls: message(cls, name=name, take=take, build=build)
    if isinstance(cls, type):
        SHARED.forget_former(cls, cls.__qualname__ if name is None else name)
    SHARED.add(cls, name, take, build)
    return cls


def options_of(cls: type) -> dict[str, Any] | None:
    """Return the keyword arguments with which ``message`` registered a class, if it did."""
    carried = SHARED.registered(cls)
    if carried is None:
        return None
    take, build = _hooks_of(carried)
    return {"name": carried.name, "take": take, "build": build}
