"""The reference pages, ``help()`` and signatures show what is public, and nothing else."""

import importlib
import inspect
import pydoc
import re
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest

import rankwire
from rankwire import errors

PAGES = Path(__file__).parents[1] / "docs" / "reference"
ENTRY = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", re.MULTILINE)
MEMBERS = re.compile(r"^      members: \[(.*)\]$", re.MULTILINE)
# Shown by a sentence of another entry.
WITHOUT_AN_ENTRY = {"ANY_RANK", "__version__"}


def named(path):
    home, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        return getattr(importlib.import_module(home), name)


def entries():
    """Return what each entry of the pages names, with the members that it lists, if it does."""
    found = []
    for page in sorted(PAGES.glob("*.md")):
        for path, options in ENTRY.findall(page.read_text()):
            members = MEMBERS.search(options)
            listed = members and [name.strip('"') for name in members[1].split(", ")]
            found.append((named(path), listed))
    return found


def methods(cls):
    """Return the public methods and properties of a class that this package has written."""
    found = set()
    for name in dir(cls):
        home = next((base for base in cls.__mro__ if name in vars(base)), None)
        is_ours = home is not None and home.__module__.startswith("rankwire")
        member = inspect.getattr_static(cls, name)
        is_method = isinstance(member, (property, classmethod, staticmethod))
        if is_ours and not name.startswith("_") and (is_method or inspect.isroutine(member)):
            found.add(name)
    return found


def public_classes():
    things = [getattr(rankwire, name) for name in rankwire.__all__]
    return [t for t in things if inspect.isclass(t) and not issubclass(t, BaseException)]


def test_every_public_name_has_an_entry():
    shown = set()
    for thing, _ in entries():
        is_module = inspect.ismodule(thing)
        shown |= {*vars(thing)} if is_module else {thing.__name__}
    assert {*rankwire.__all__, *errors.__all__} - shown == WITHOUT_AN_ENTRY


@pytest.mark.parametrize("cls", public_classes(), ids=lambda cls: cls.__name__)
def test_the_reference_of_a_class_has_its_public_methods_and_no_others(cls):
    (listed,) = [listed for thing, listed in entries() if thing is cls]
    if listed is None:  # then the page has all of the class that begins with no underscore
        own = {name: member for name, member in vars(cls).items() if not name.startswith("_")}
        fields = inspect.get_annotations(cls)
        listed = [
            n for n, m in own.items() if n not in fields and not inspect.ismemberdescriptor(m)
        ]
    expected = methods(cls)
    if issubclass(cls, rankwire.Backend) and cls is not rankwire.Backend:
        expected -= {*methods(rankwire.Backend), "incarnation"}
    assert sorted(listed) == sorted(expected)


@pytest.mark.parametrize("cls", public_classes(), ids=lambda cls: cls.__name__)
def test_help_shows_the_public_methods_and_no_others(cls):
    text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    shown = {*re.findall(r"^ \|  (?:async )?(\w+)\(", text, re.MULTILINE)} - {cls.__name__}
    functions = {
        name for name in methods(cls) if not isinstance(inspect.getattr_static(cls, name), property)
    }
    inherited = {name for base in (Future, Mapping) if issubclass(cls, base) for name in dir(base)}
    public = {name for name in shown if not name.startswith("_")}
    assert public - inherited == functions - inherited


def test_what_the_pages_use_of_a_backend_is_shown():
    used = set()
    for page in PAGES.parent.glob("*.md"):
        used |= {*re.findall(r"\bbackend\.(\w+)", page.read_text())}
    instance_attributes = {"rank", "world_size"}
    assert used - {*dir(rankwire.TcpBackend)} == instance_attributes & used


def test_the_signature_of_register_can_be_read():
    signature = inspect.signature(rankwire.RpcAgent.register)
    assert str(signature) == (
        "(self, name: 'str | T | None' = None, function: 'T' = <left out>, *, "
        "replace: 'bool' = False, copy: 'bool' = False, idempotent: 'bool' = False, "
        "direct: 'bool' = False) -> 'T | Callable[[F], F]'"
    )
    assert "<left out>" in pydoc.render_doc(rankwire.RpcAgent.register)
