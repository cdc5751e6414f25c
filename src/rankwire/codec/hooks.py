"""Hooks: the user's own way for the instances of a class to come apart and be built again.

``take`` gives what travels in place of an instance, ``build`` makes an instance of it at the other
end. Both learn who is there, as the caller of the codec says: to the codec a peer is an opaque
argument. A ``take`` may do more than look at the value, such as count who holds it; so what it did
can be undone if its message does not leave, by the codec while it encodes and by whoever sends
afterwards. How a state travels is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from rankwire.errors import InvalidMessageError, RankwireError
from rankwire.public_dir import PublicDir
from rankwire.texts import one_line, text_of, type_name


class TakeContext(PublicDir):
    """What ``take`` learns of the message that its value is part of.

    Attributes:
        peer: The rank that the message is for; None if that is not one rank, or is not known.
    """

    __slots__ = ("_undos", "peer")
    _SHOWN = ("peer", "undo")

    def __init__(self, peer: int | None) -> None:
        self.peer = peer
        self._undos: list[Callable[[], object]] = []

    def undo(self, callback: Callable[[], object]) -> None:
        """Have something called if this message certainly does not leave; at most once."""
        self._undos.append(callback)

    @property
    def can_undo(self) -> bool:
        """Whether there is anything to undo."""
        return bool(self._undos)

    def undo_all(self) -> None:
        """Call what is to be called, the last first. Safe from any thread, and to repeat.

        Raises:
            ExceptionGroup: Some raised; the others were called all the same.
        """
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
    """What ``build`` learns of the message that its state is part of.

    Attributes:
        peer: The rank that sent it; None if that is not known.
        notes: What one ``build`` leaves to those after it. All of a message have the same, and it
            goes with the message.
    """

    __slots__ = ("notes", "peer")

    def __init__(self, peer: int | None) -> None:
        self.peer = peer
        self.notes: dict[Any, Any] = {}


Buffer: TypeAlias = bytes | bytearray | memoryview
Take: TypeAlias = Callable[[Any, TakeContext], Any]
Build: TypeAlias = Callable[[Any, BuildContext], Any]


class UndoableBuffers(list[Buffer]):
    """The buffers of a message for which hooks have done something that can be undone."""

    __slots__ = ("sending",)

    def __init__(self, buffers: Iterable[Buffer], sending: TakeContext) -> None:
        super().__init__(buffers)
        self.sending = sending


def with_undos_of(message: Sequence[Buffer], buffers: list[Buffer]) -> list[Buffer]:
    """Return buffers that stand in for those of a message, and can be undone as these could."""
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

    def is_same(self, take: Take | None, build: Build | None) -> bool:
        """Tell whether it has these hooks."""
        return (
            self.take == take and self.build_hook == build
        )  # bound methods are equal, not identical

    def build(self, state: Any, receiving: BuildContext) -> Any:
        """Build an instance of what came from the wire.

        Raises:
            InvalidMessageError: The hook raised; a ``RankwireError`` of its own keeps its text.
        """
        try:
            return self.build_hook(state, receiving)
        except (InvalidMessageError, KeyboardInterrupt):
            raise
        except RankwireError as error:
            raise InvalidMessageError(error.message) from error
        # SystemExit too: a message must not end the thread that reads it.
        except BaseException as error:
            raise InvalidMessageError(
                one_line(f"building {self.name!r} raised {type_name(error)}: {text_of(error)}")
            ) from error
