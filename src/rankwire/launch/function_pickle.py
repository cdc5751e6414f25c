"""Pickle functions, arguments and results between a starter and its rank processes.

Another process cannot import a function of a notebook, script or prompt, which lives in
``__main__``. So cloudpickle sends it by value, with its closure and the globals that it names. In
the rank its globals are the ``__main__`` there, so one cell can use what another has set.

Unpickling runs code. That is safe here and nowhere else: the bytes come over a socket pair that the
starter made before it started the process, both processes belong to one user, and running the
starter's functions is the purpose. Messages between ranks always use the codec.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

from rankwire.codec.classes import message, options_of

_MAIN = "the globals of __main__"


def pack(value: Any) -> bytes:
    """Pickle a value; a user's class may raise any exception."""
    import cloudpickle  # takes 20 ms to import; most programs do not need it

    class Packer(cloudpickle.Pickler):  # type: ignore[misc]
        """Replace the globals of ``__main__`` by a reference to those of the other process."""

        def __init__(self, file: io.BytesIO) -> None:
            super().__init__(file)
            own = sys.modules["__main__"].__dict__
            self._stand_in = {"__name__": "__main__"}
            self.globals_ref[id(own)] = self._stand_in

        def reducer_override(self, thing: Any) -> Any:
            reduced = super().reducer_override(thing)
            options = options_of(thing) if isinstance(thing, type) else None
            if options is None or type(reduced) is not tuple or len(reduced) != 6:
                return reduced
            make, args, state, *rest, set_state = reduced  # a class that is pickled by value
            return make, args, (set_state, state, options), *rest, _set_message

        def persistent_id(self, thing: Any) -> str | None:
            return _MAIN if thing is self._stand_in else None

    file = io.BytesIO()
    Packer(file).dump((value, _sources_of(value)))
    return file.getvalue()


def unpack(pickled: bytes) -> Any:
    """Unpickle bytes from the starter's pipe, and only those; may raise any exception."""
    value, sources = _Unpacker(io.BytesIO(pickled)).load()
    for name, lines in sources.items():  # mtime None: linecache does not look for a file
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return value


def _set_message(cls: type, details: tuple[Any, Any, dict[str, Any]]) -> None:
    """Complete an unpickled class, and register it as a message type with the same options."""
    set_state, state, options = details
    set_state(cls, state)
    message(cls, **options)


class _Unpacker(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        if name != _MAIN:
            raise pickle.UnpicklingError(f"unknown reference {name!r}")
        return sys.modules["__main__"].__dict__


def _sources_of(value: Any) -> dict[str, list[str]]:
    """Return sources that are not in a file, for tracebacks in the rank."""
    function = value[0] if isinstance(value, tuple) and value else value
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return {}
    names = {each.co_filename for each in _codes_of(function, code)}
    return {name: linecache.getlines(name) for name in names if _is_cell(name)}


def _codes_of(function: Any, code: CodeType) -> Iterator[CodeType]:
    yield code
    for name in code.co_names:
        named = getattr(function.__globals__.get(name), "__code__", None)
        if isinstance(named, CodeType):
            yield named


def _is_cell(name: str) -> bool:
    return name in linecache.cache and not os.path.exists(name)
