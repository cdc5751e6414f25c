"""Decide which functions and classes of a program other ranks can reach by name.

torch sends functions as pickles, and a pickle can name anything. Here a function travels as
``module:qualname``, and the callee applies these rules:

1. Only modules that are already imported are searched.
2. The module is ``__main__``, in the same package, a file beside it, or allowed by name. With
   ``allow="decorated"`` only exposed functions and classes are found, in any module.
3. Each further step goes through a class that was defined there. The target's own ``__module__``
   and ``__qualname__`` must match, so imports and aliases are not found.
4. No name on the way begins with an underscore, unless the function is exposed or allowed.
5. Creating an object runs only constructors of the program, not those of a library such as
   ``subprocess.Popen``.
6. Without ``allow="decorated"``, ``listed_functions`` of torch and Python are found as well.

Names are looked up in the dictionaries of modules and classes, never by ``getattr``, so that no
property, module ``__getattr__`` or metaclass runs. Safe from any thread.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rankwire.errors import ConfigurationError, RankwireError
from rankwire.torch.rpc.functions import is_exposed
from rankwire.torch.rpc.listed_functions import (
    LAYERS,
    LISTED_FUNCTIONS,
    NAMES_OF_LISTED,
    check_of,
    is_layer,
)

MAIN = "__main__"
DECORATED = "decorated"
# The same module in processes that multiprocessing has spawned.
_SPAWNED_MAIN = "__mp_main__"
_MAX_NAME = 1024
_MAX_KNOWN = 4096
# Run with ``-m``, they would open their whole package as the program's.
_NO_PROGRAMS = frozenset((*sys.stdlib_module_names, "numpy", "pytest", "rankwire", "torch"))
_INSTALLED = frozenset(("site-packages", "dist-packages"))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools._lru_cache_wrapper)
_HOW_TO_ALLOW = (
    "To allow it on purpose, decorate it with @rankwire.torch.rpc.exposed, or name it: "
    "init_rpc(..., allow=[{allowed!r}])"
)
# Their constructors do not use their arguments.
_CONSTRUCTORS = (object, type, torch.nn.Module, enum.Enum, enum.EnumMeta)
# Their __init__ uses the arguments, their __new__ does not.
_IDLE_NEW = (dict, list, set)


class NameRefusedError(RankwireError, PermissionError):
    """Other ranks cannot reach a name, or an object has no name."""


class _Step(NamedTuple):
    place: Mapping[str, Any]
    key: str
    found: Any


class _Known(NamedTuple):
    steps: tuple[_Step, ...]
    target: Any


class NamingRule:
    """Finds the target of a name, or refuses it.

    Args:
        allow: Modules, with their submodules; ``module:qualname`` for one function; functions or
            classes; or ``"decorated"``.
        anything: Whether every imported object is found, for worlds with pickle.
    """

    def __init__(self, allow: Iterable[Any] | str = (), *, anything: bool = False) -> None:
        self.is_strict = allow == DECORATED
        self.anything = anything
        if isinstance(allow, str) and not self.is_strict:
            raise ConfigurationError(f'allow is a list of modules, or "decorated", not {allow!r}')
        entries = () if self.is_strict else [_entry(entry) for entry in allow]
        self._modules = frozenset(entry for entry in entries if ":" not in entry)
        self._single = frozenset(entry for entry in entries if ":" in entry)
        self._known: dict[str, _Known] = {}

    def find(self, name: str) -> Any:
        """Return a name's function or class, or raise ``NameRefusedError``."""
        known = self._known.get(name)
        if known is not None and all(place.get(key) is found for place, key, found in known.steps):
            return known.target
        if not self.is_strict:
            found = LISTED_FUNCTIONS.get(name) or LAYERS.get(name)
            if found is not None:
                return found
        known = self._look_up(name)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[name] = known
        return known.target

    def allows_methods_of(self, cls: type) -> bool:
        """Return whether methods that a class defines may be called on shared objects."""
        if is_exposed(cls) or self.anything:
            return True
        module = _canonical(getattr(cls, "__module__", None))
        return f"{module}:{cls.__qualname__}" in self._single or self._is_open(module)

    def allows_module(self, name: str | None) -> bool:
        """Return whether other ranks can reach what a module defines, exposed or not."""
        return self._is_open(_canonical(name))

    def _look_up(self, name: str) -> _Known:
        module_name, path = _parts(name)
        module = sys.modules.get(module_name)
        if not isinstance(module, types.ModuleType):
            raise NameRefusedError(
                f"there is no {name!r} here: module {module_name!r} is not imported. Like torch, "
                "whose RPC pickler does not serialize function code, rankwire sends the name of a "
                "function: import its module on every rank"
            )
        place: Mapping[str, Any] = vars(module)
        owner: type | None = None
        steps = []
        for depth, key in enumerate(path):
            self._check_key(name, key)
            owner_of_key, raw = member_of(place, owner, key)
            if raw is None:
                raise NameRefusedError(
                    f"there is no {name!r} here. Like torch, whose RPC pickler does not serialize "
                    "function code, rankwire sends the name of a function: define it on every rank"
                )
            steps.append(_Step(place if owner_of_key is None else vars(owner_of_key), key, raw))
            target = _unwrapped(raw, owner)
            self._check_origin(name, target, module_name, owner_of_key, key)
            if depth < len(path) - 1:
                if not isinstance(target, type):
                    raise self._refusal(name, f"{key!r} is not a class", module_name)
                place, owner = vars(target), target
        self._check_target(name, target, owner, module_name)
        return _Known(tuple(steps), target)

    def _check_key(self, name: str, key: str) -> None:
        if not key.isidentifier():
            raise NameRefusedError(
                f"{name!r} is not the name of a function at the top of a module or class"
            )
        if key.startswith("__") and not self.anything:
            raise NameRefusedError(f"{name!r} is private: {key!r} begins with two underscores")

    def _check_origin(
        self, name: str, target: Any, module_name: str, owner: type | None, key: str
    ) -> None:
        if self.anything:
            return
        plain = target.__func__ if isinstance(target, types.MethodType) else target
        if not isinstance(plain, (*_FUNCTIONS, type)):
            raise self._refusal(name, f"{key!r} is neither a function nor a class", module_name)
        module = module_name if owner is None else _canonical(owner.__module__)
        qualname = key if owner is None else f"{owner.__qualname__}.{key}"
        own = _canonical(_own(plain, "__module__")), _qualname(plain)
        if own != (module, qualname):
            raise self._refusal(
                name, f"it is {own[0]}:{own[1]}, which was not defined there", module_name
            )

    def _check_target(self, name: str, target: Any, owner: type | None, module_name: str) -> None:
        if self.anything:
            if not callable(target):
                raise NameRefusedError(f"{name!r} is not a function")
            return
        plain = target.__func__ if isinstance(target, types.MethodType) else target
        if name in self._single or is_exposed(plain):
            return
        private = [key for key in name.partition(":")[2].split(".") if key.startswith("_")]
        if private:
            raise self._refusal(name, f"{private[0]!r} begins with an underscore", None)
        if owner is not None and is_exposed(owner):
            return
        if self.is_strict:
            raise self._refusal(name, 'it is not exposed, and allow="decorated"', module_name)
        self._check_modules(name, module_name, _canonical(_own(plain, "__module__")))
        if isinstance(target, type):
            self._check_constructor(name, target)

    def _check_modules(self, name: str, *modules: str | None) -> None:
        for module in sorted({each for each in modules if each is not None}):
            if not self._is_open(module):
                raise self._refusal(name, f"module {module!r} is not one of the program's", module)

    def _check_constructor(self, name: str, cls: type) -> None:
        """Check that creating an object of a class runs no constructor of a library."""
        harmless = () if issubclass(cls, type) else _CONSTRUCTORS  # a metaclass makes classes
        for owner in constructors_of(cls):
            is_known = owner in harmless or is_layer(owner) or check_of(owner) is not None
            if not is_known and not _is_error(owner) and not self.allows_methods_of(owner):
                raise self._refusal(
                    name,
                    f"its constructor is that of {owner.__module__}.{owner.__qualname__}, which is "
                    "not one of the program's",
                    None,
                )

    def _is_open(self, module_name: str | None) -> bool:
        if module_name is None or self.is_strict:
            return False
        if module_name == MAIN:
            return True
        parents = module_name.split(".")
        if any(".".join(parents[:end]) in self._modules for end in range(1, len(parents) + 1)):
            return True
        return _is_of_program(module_name)

    @staticmethod
    def _refusal(name: str, why: str, module: str | None) -> NameRefusedError:
        if module is not None and module.partition(".")[0] == "torch":
            why += ", and it is not in the table of torch's functions that other ranks may call"
            module = None
        return NameRefusedError(
            f"{name!r} is refused: {why}. {_HOW_TO_ALLOW.format(allowed=module or name)}"
        )


def name_of(function: Any) -> str:
    """Return the name under which a function or class travels, or raise ``NameRefusedError``."""
    try:
        listed = NAMES_OF_LISTED.get(function)
    except TypeError:  # not hashable
        listed = None
    if listed is not None:
        return listed
    if isinstance(function, types.MethodType) and isinstance(function.__self__, type):
        owner = function.__self__
        return f"{_canonical(owner.__module__)}:{owner.__qualname__}.{function.__name__}"
    if not isinstance(function, (*_FUNCTIONS, type)):
        raise NameRefusedError(
            f"{function!r} has no name by which another rank could find it: send a function or "
            "class at the top of a module, and what it works on as an argument"
        )
    module, qualname = _canonical(_own(function, "__module__")), _qualname(function)
    if module is None or qualname is None or not _is_path(qualname):
        raise NameRefusedError(
            f"{module}:{qualname} has no name by which another rank could find it: move it to the "
            "top of its module"
        )
    if _is_another(module, qualname, function):
        raise NameRefusedError(
            f"{module}:{qualname} is another function than the one that was given, and another "
            "rank would run that one: give yours a name of its own at the top of its module"
        )
    return f"{module}:{qualname}"


def _is_another(module: str, qualname: str, function: Any) -> bool:
    place: Any = vars(sys.modules.get(module, object))
    owner, found = None, None
    for key in qualname.split("."):
        owner, found = member_of(place, owner, key)
        found = _unwrapped(found, owner)
        if not isinstance(found, type):
            break
        owner, place = found, None
    plain = found.__func__ if isinstance(found, types.MethodType) else found
    return isinstance(plain, types.FunctionType) and plain is not function


def constructors_of(cls: type) -> list[type]:
    """Return the classes whose code runs when an object of a class is created."""
    found = [member_of({}, cls, key)[0] for key in ("__new__", "__init__")]
    found.append(member_of({}, type(cls), "__call__")[0])
    if found[0] in _IDLE_NEW:
        del found[0]
    return [owner for owner in found if owner is not None]


def _is_error(cls: type) -> bool:
    return cls.__module__ == "builtins" and issubclass(cls, BaseException)


def _entry(entry: Any) -> str:
    if isinstance(entry, types.ModuleType):
        return entry.__name__
    if isinstance(entry, str) and all(_is_path(part) for part in entry.split(":", 1)):
        return entry
    if callable(entry):
        return name_of(entry)
    raise ConfigurationError(f"allow has modules, their names, and functions, not {entry!r}")


def _parts(name: str) -> tuple[str, list[str]]:
    module_name, colon, qualname = name.partition(":")
    if not colon or not module_name or not qualname or len(name) > _MAX_NAME:
        raise NameRefusedError(f"{name[:_MAX_NAME]!r} is not of the form module:name")
    return _canonical(module_name) or "", qualname.split(".")


def member_of(place: Mapping[str, Any], owner: type | None, key: str) -> tuple[type | None, Any]:
    """Return the class that defines a key, or None in a module, and the key's value."""
    if owner is None:
        return None, place.get(key)
    for cls in type.__dict__["__mro__"].__get__(owner):
        raw = vars(cls).get(key)
        if raw is not None:
            return cls, raw
    return owner, None


def _unwrapped(raw: Any, owner: type | None) -> Any:
    """Return the result of attribute access on the class, without running code."""
    if isinstance(raw, staticmethod):
        return raw.__func__
    if isinstance(raw, classmethod) and owner is not None:
        return types.MethodType(raw.__func__, owner)
    return raw


def _qualname(target: Any) -> str | None:
    # torch's operators are at the top of their module.
    qualname = _own(target, "__qualname__")
    return qualname and qualname.removeprefix("_VariableFunctionsClass.")


def _own(target: Any, attribute: str) -> str | None:
    value = getattr(target, attribute, None)
    return value if isinstance(value, str) else None


def _canonical(module_name: str | None) -> str | None:
    return MAIN if module_name == _SPAWNED_MAIN else module_name


def _is_path(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _is_of_program(module_name: str) -> bool:
    """Return whether a module is in the package of ``__main__``, or a file beside it."""
    main = sys.modules.get(MAIN)
    spec = getattr(main, "__spec__", None)
    package = spec.parent.partition(".")[0] if spec is not None and spec.parent else ""
    if package and package not in _NO_PROGRAMS:
        return module_name == package or module_name.startswith(f"{package}.")
    own, other = (_folder(module) for module in (main, sys.modules.get(module_name)))
    return own is not None and own == other and "." not in module_name


def _folder(module: types.ModuleType | None) -> Path | None:
    """Return the folder of a module's file, unless it also contains installed modules."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    folder = Path(file).resolve().parent
    is_shared = _INSTALLED.intersection(folder.parts) or folder == Path(functools.__file__).parent
    return None if is_shared else folder
