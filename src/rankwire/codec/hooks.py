"""Hooks: the user's own functions that take instances of a class apart and rebuild them.

If a message does not leave, the codec or the sender undoes what ``take`` did for it, such as
counting references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from rankwire.errors import InvalidMessageError, RankwireError
from rankwire.public_dir import PublicDir
from rankwire.texts import one_line, text_of, type_name


class TakeContext(PublicDir):
    """Passed to ``take``: describes the message that contains the value.

    Attributes:
        peer: The receiving rank; None for several ranks, or if unknown.
    """

    __slots__ = ("_undos", "peer")
    _SHOWN = ("peer", "undo")

    def __init__(self, peer: int | None) -> None:
        self.peer = peer
        self._undos: list[Callable[[], object]] = []

    def undo(self, callback: Callable[[], object]) -> None:
        """Call ``callback``, at most once, if this message certainly does not leave."""
        self._undos.append(callback)

    @property
    def can_undo(self) -> bool:
        """Whether there are callbacks left."""
        return bool(self._undos)

    def undo_all(self) -> None:
        """Call the callbacks, last first; raise their errors as a group. Safe to repeat."""
        errors = []
        while self._undos:
            try:
                callback = self._undos.pop()
            except IndexError:  # another thread was faster
                break
            try:
                callback()
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("undoing a message that was not sent", errors)


class BuildContext:
    """Passed to ``build``: describes the message that contains the state.

    Attributes:
        peer: The sending rank; None if unknown.
        notes: Shared by all ``build`` calls of one message.
    """

    __slots__ = ("notes", "peer")

    def __init__(self, peer: int | None) -> None:
        self.peer = peer
        self.notes: dict[Any, Any] = {}


Buffer: TypeAlias = bytes | bytearray | memoryview
Take: TypeAlias = Callable[[Any, TakeContext], Any]
Build: TypeAlias = Callable[[Any, BuildContext], Any]


class UndoableBuffers(list[Buffer]):
    """The buffers of a message for which hooks have registered callbacks."""

    __slots__ = ("sending",)

    def __init__(self, buffers: Iterable[Buffer], sending: TakeContext) -> None:
        super().__init__(buffers)
        self.sending = sending


def with_undos_of(message: Sequence[Buffer], buffers: list[Buffer]) -> list[Buffer]:
    """Return buffers that replace those of a message and keep its callbacks."""
    return (
        UndoableBuffers(buffers, message.sending) if type(message) is UndoableBuffers else buffers
    )


class HookedClass:
    """A class that was registered with hooks."""

    def __init__(self, name: str, cls: type, take: Take, build: Build) -> None:
        self.name = name
        self.cls = cls
        self.take = take
        self.build_hook = build

    def build(self, state: Any, receiving: BuildContext) -> Any:
        """Build an instance from a received state; an error of the hook refuses the message."""
        try:
            return self.build_hook(state, receiving)
        except (InvalidMessageError, KeyboardInterrupt):
            raise
        except RankwireError as error:
            raise InvalidMessageError(error.message) from error
        # SystemExit too: a message must not end the reader thread.
        except BaseException as error:
            raise InvalidMessageError(
                one_line(f"building {self.name!r} raised {type_name(error)}: {text_of(error)}")
            ) from error
