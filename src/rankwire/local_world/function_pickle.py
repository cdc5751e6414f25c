"""Parcels: functions, arguments and results on their way between a starter and its processes.

A function of a notebook, of a script or of a prompt lives in ``__main__``, which another process
cannot import. So it travels by value (cloudpickle): its code, what it closes over, and the globals
that it names. In the process it gets the ``__main__`` there for its globals, and what it named is
set in it. So a function finds there what an earlier one has left: ``global agent`` in one cell is
used by the next. What is importable travels by name, as pickle does it.

Unpickling runs code. That is in order here and nowhere else: a parcel goes over a pair of sockets
that the starter made before it started the process, both ends belong to processes of one user and
one program, and running the starter's functions is what the process is for. No address leads to
that pipe; what ranks send each other goes through the codec, as always.
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

from rankwire.codec.message import message, options_of

_MAIN = "the globals of __main__"


def pack(value: Any) -> bytes:
    """Return a value as bytes.

    Raises:
        Exception: It cannot be packed; of whatever type its own methods raise.
    """
    import cloudpickle  # takes 20 ms, and most programs do not need it

    class Packer(cloudpickle.Pickler):  # type: ignore[misc]
        """Leaves the globals of ``__main__`` out: they are those of the other process."""

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
            make, args, state, *rest, set_state = reduced  # a class that travels by value
            return make, args, (set_state, state, options), *rest, _set_message

        def persistent_id(self, thing: Any) -> str | None:
            return _MAIN if thing is self._stand_in else None

    file = io.BytesIO()
    Packer(file).dump((value, _sources_of(value)))
    return file.getvalue()


def unpack(parcel: bytes) -> Any:
    """Return what was packed. Only for what came over a pipe between starter and process.

    Raises:
        Exception: It cannot be unpacked, such as a function of a module that is not here.
    """
    value, sources = _Unpacker(io.BytesIO(parcel)).load()
    for name, lines in sources.items():  # without a time: nobody looks for such a file
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return value


def _set_message(cls: type, details: tuple[Any, Any, dict[str, Any]]) -> None:
    """Complete a class that has travelled, and let its instances be sent as they were there."""
    set_state, state, options = details
    set_state(cls, state)
    message(cls, **options)


class _Unpacker(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        if name != _MAIN:
            raise pickle.UnpicklingError(f"nothing is called {name!r}")
        return sys.modules["__main__"].__dict__


def _sources_of(value: Any) -> dict[str, list[str]]:
    """Return the sources of a function that are in no file, so that tracebacks can show them."""
    function = value[0] if isinstance(value, tuple) and value else value
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return {}
    names = {each.co_filename for each in _codes_of(function, code)}
    return {name: linecache.getlines(name) for name in names if _is_cell(name)}


def _codes_of(function: Any, code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of those that it names."""
    yield code
    for name in code.co_names:
        named = getattr(function.__globals__.get(name), "__code__", None)
        if isinstance(named, CodeType):
            yield named


def _is_cell(name: str) -> bool:
    """Whether the lines of a source are known that is in no file, such as a cell of a notebook."""
    return name in linecache.cache and not os.path.exists(name)
