"""The classes that a codec carries because the user registered them.

They are enums, dataclasses and msgspec Structs. The wire names a class by its registered name and
never by a path to import, so a message cannot reach any other class. Here is how an instance
comes apart into values and is built again; how those values travel is not known here.
"""

from __future__ import annotations

import dataclasses
import inspect
from enum import Enum, Flag
from typing import Any

import msgspec

from rankwire.errors import ConfigurationError, InvalidMessageError

# An instance of a subclass of these holds more than its fields, and that part would be lost.
_BUILTINS = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)

# Python looks at the bits of an unknown flag one by one, each time at all of them.
_MAX_FLAG_BITS = 256


class EnumClass:
    """A registered enum.

    A member travels by its name; a flag by its value, since combined flags have no name.
    """

    def __init__(self, name: str, cls: type[Enum]) -> None:
        self.name = name
        self.cls = cls
        self._is_flag = issubclass(cls, Flag)

    def key_of(self, member: Enum) -> Any:
        """Return what stands for a member on the wire."""
        return member.value if self._is_flag else member.name

    def member_of(self, key: Any) -> Enum:
        """Return the member that a received key stands for."""
        try:
            if self._is_flag and type(key) is int and key.bit_length() <= _MAX_FLAG_BITS:
                return self.cls(key)
            return self.cls.__members__[key]
        except Exception as error:
            raise InvalidMessageError(f"enum {self.name!r} has no such member") from error


class RecordClass:
    """A registered dataclass or Struct.

    All its fields travel. Building an instance calls the constructor, so that its checks run.
    """

    def __init__(self, name: str, cls: type[Any], fields: dict[str, bool]) -> None:
        """Describe a class by its fields, each with whether the constructor takes it."""
        self.name = name
        self.cls = cls
        self.fields = tuple(fields)
        # Travels too: ranks with different versions of a class must not mix up its fields.
        self.signature = ",".join(fields)
        self._set_later = [field for field, in_constructor in fields.items() if not in_constructor]
        try:
            inspect.signature(cls).bind(**{f: None for f in fields if f not in self._set_later})
        except TypeError as error:
            raise ConfigurationError(
                f"{cls.__qualname__} cannot be built from its fields alone: {error}"
            ) from error

    def values_of(self, record: Any) -> list[Any]:
        """Return the values of all fields in order; ``AttributeError`` if one was never set."""
        return [getattr(record, field) for field in self.fields]

    def build(self, values: Any) -> Any:
        """Build an instance of what should be the list of the values of :attr:`fields`."""
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


class ClassTable:
    """Registered classes by class, for encoding, and by name, for decoding.

    Registering while other threads look classes up is safe: each table changes by one assignment.
    """

    def __init__(self) -> None:
        self.by_class: dict[type, EnumClass | RecordClass] = {}
        self.by_name: dict[str, EnumClass | RecordClass] = {}

    def parts_of(self, value: Any) -> list[Any] | None:
        """Return the values of the fields of a registered class's instance, of no other value."""
        carried = self.by_class.get(type(value))
        return carried.values_of(value) if isinstance(carried, RecordClass) else None

    def add(self, cls: type, name: str | None) -> None:
        """Register a class; repeating a registration changes nothing.

        Raises:
            ConfigurationError: The class is of another kind, or it or its name is taken.
        """
        if not isinstance(cls, type):
            raise ConfigurationError(f"only a class can be registered, not {cls!r}")
        name = cls.__qualname__ if name is None else name
        known = self.by_class.get(cls)
        if known is not None and known.name == name:
            return
        if known is not None:
            raise ConfigurationError(f"{cls.__qualname__} is registered already, as {known.name!r}")
        if name in self.by_name:
            raise ConfigurationError(f"another class is registered as {name!r}; pass name=")
        carried = _carried(name, cls)
        self.by_name[name] = carried
        self.by_class[cls] = carried


def _carried(name: str, cls: type[Any]) -> EnumClass | RecordClass:
    if issubclass(cls, Enum):
        return EnumClass(name, cls)
    if not issubclass(cls, _BUILTINS):
        if issubclass(cls, msgspec.Struct):
            return RecordClass(name, cls, dict.fromkeys(cls.__struct_fields__, True))
        if dataclasses.is_dataclass(cls):
            return RecordClass(name, cls, {f.name: f.init for f in dataclasses.fields(cls)})
    raise ConfigurationError(
        f"{cls.__qualname__} cannot be registered: only enums, dataclasses and msgspec Structs"
        " that are not also builtin containers"
    )
