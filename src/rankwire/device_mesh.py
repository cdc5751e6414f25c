"""``DeviceMesh``: the ranks of a world as a grid, and the groups along its axes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np

from rankwire.backends.arguments import as_index, check_rank, check_world
from rankwire.backends.base import Backend
from rankwire.backends.sub import SubBackend
from rankwire.errors import ConfigurationError


class DeviceMesh:
    """The ranks 0..size-1 as a grid, in row-major order as in numpy.

    The last axis varies fastest: in a mesh of (nodes, ranks per node), the ranks of a node are
    consecutive. Only ``subgroup`` and ``subgroups`` communicate. A mesh is immutable, so it is safe
    from any thread; meshes with equal shapes and names are equal. Arguments may be numpy integers.
    An axis is an index, where -1 is the last, or a name. Ranks and coordinates are never negative.

    Args:
        shape: The number of ranks along each axis, at least 1.
        world_size: The number of ranks, which must be the product of the shape.
        names: A name for each axis.

    Raises:
        ConfigurationError: The shape is empty, contains something other than positive integers, or
            does not fill the world; or the names are not different strings, one for each axis.
        InvalidWorldSizeError: The world size is not a positive integer.
    """

    def __init__(
        self, shape: Iterable[int], world_size: int, *, names: Iterable[str] | None = None
    ) -> None:
        self._shape = _checked_shape(shape)
        check_world(0, world_size)
        self._size = math.prod(self._shape)
        if self._size != world_size:
            raise ConfigurationError(
                f"a mesh of shape {self._shape} has {self._size} ranks, the world {world_size}"
            )
        self._names = None if names is None else _checked_names(names, self.ndim)
        self._ranks = np.arange(self._size).reshape(self._shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return self._shape

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the axes, or None."""
        return self._names

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def coords(self, rank: int) -> tuple[int, ...]:
        """Return the index of a rank along each axis.

        Raises:
            InvalidRankError: The rank is not in this mesh.
        """
        rank = check_rank(rank, self._size)
        return tuple(map(int, np.unravel_index(rank, self._shape)))

    def rank_of(self, coords: Iterable[int]) -> int:
        """Return the rank at the given index along each axis.

        Raises:
            ConfigurationError: There is not one index for each axis, or one is out of range.
        """
        chosen = _as_tuple(coords, "coordinates")
        if len(chosen) != self.ndim:
            raise ConfigurationError(
                f"a mesh of shape {self._shape} has {self.ndim} coordinates, not {chosen!r}"
            )
        indices = []
        for axis, (coordinate, length) in enumerate(zip(chosen, self._shape, strict=True)):
            index = as_index(coordinate)
            if index is None or not 0 <= index < length:
                raise ConfigurationError(
                    f"coordinate {coordinate!r} of {chosen!r} is not an integer from 0 to "
                    f"{length - 1}, as {self._called(axis)} has"
                )
            indices.append(index)
        return int(self._ranks[tuple(indices)])

    def ranks_along_dim(self, axis: int | str, rank: int) -> list[int]:
        """Return the ranks of the group that contains ``rank`` along an axis, ascending.

        Raises:
            ConfigurationError: The axis is invalid.
            InvalidRankError: The rank is not in this mesh.
        """
        chosen = self._axis(axis)
        index: list[Any] = list(self.coords(rank))
        index[chosen] = slice(None)
        return list(map(int, self._ranks[tuple(index)]))

    def groups_along_dim(self, axis: int | str) -> list[list[int]]:
        """Return all groups along an axis, sorted by their first members. Each rank is in one.

        Raises:
            ConfigurationError: The axis is invalid.
        """
        chosen = self._axis(axis)
        lines = np.moveaxis(self._ranks, chosen, -1).reshape(-1, self._shape[chosen])
        return [list(map(int, line)) for line in lines]

    def subgroup(
        self, backend: Backend, axis: int | str, *, timeout: float | None = None
    ) -> SubBackend:
        """Create the group of this rank along an axis. All ranks of that group must call this.

        Ranks that create groups along several axes must do so in the same order.

        Args:
            backend: The ranks of this mesh. It must stay open; the caller closes the group.
            axis: An index or a name.
            timeout: Seconds to create the group, and the default of its operations. None is the
                backend's.

        Raises:
            ConfigurationError: The axis is invalid, or the backend has another number of ranks.
            MembershipError: Another member creates a different group, for example of another mesh.
            DeadlineExceededError: ``waiting_for`` has the ranks that did not confirm in time.
        """
        chosen = self._axis(axis)
        if backend.world_size != self._size:
            raise ConfigurationError(
                f"a mesh of shape {self._shape} has {self._size} ranks, "
                f"the backend {backend.world_size}"
            )
        return SubBackend(backend, self.ranks_along_dim(chosen, backend.rank), timeout=timeout)

    def subgroups(
        self, backend: Backend, *, timeout: float | None = None
    ) -> tuple[SubBackend, ...]:
        """Create the group of this rank along every axis. All ranks must call this.

        After an error, the groups created so far are closed.

        Args:
            backend: The ranks of this mesh. It must stay open; the caller closes the groups.
            timeout: As for ``subgroup``, for each group.

        Returns:
            One group for each axis, in order.

        Raises:
            ConfigurationError: The backend has another number of ranks.
            MembershipError: Another rank creates a different group, for example of another mesh.
            DeadlineExceededError: ``waiting_for`` has the ranks that did not confirm in time.
        """
        with ExitStack() as unfinished:
            groups = tuple(
                unfinished.enter_context(self.subgroup(backend, axis, timeout=timeout))
                for axis in range(self.ndim)
            )
            unfinished.pop_all()
        return groups

    def __repr__(self) -> str:
        names = "" if self._names is None else f", names={self._names}"
        return f"DeviceMesh({self._shape}, {self._size}{names})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return (self._shape, self._names) == (other._shape, other._names)

    def __hash__(self) -> int:
        return hash((self._shape, self._names))

    def _axis(self, axis: int | str) -> int:
        if isinstance(axis, str):
            if self._names is None:
                raise ConfigurationError(f"no axis {axis!r}: the axes of this mesh have no names")
            if axis not in self._names:
                raise ConfigurationError(f"no axis {axis!r}: the names are {self._names}")
            return self._names.index(axis)
        index = as_index(axis)
        if index is None:
            raise ConfigurationError(f"an axis is an integer or a name, not {axis!r}")
        if not -self.ndim <= index < self.ndim:
            raise ConfigurationError(
                f"no axis {index}: a mesh of shape {self._shape} has {-self.ndim}..{self.ndim - 1}"
            )
        return index % self.ndim

    def _called(self, axis: int) -> str:
        return f"axis {axis}" if self._names is None else f"axis {axis} ({self._names[axis]!r})"


def _checked_shape(shape: Iterable[int]) -> tuple[int, ...]:
    given = _as_tuple(shape, "the shape of a mesh")
    if not given:
        raise ConfigurationError(f"a mesh needs at least 1 axis, not the shape {given}")
    lengths = []
    for length in given:
        index = as_index(length)
        if index is None or index < 1:
            raise ConfigurationError(
                f"a mesh has positive integers as its shape, not {length!r} as in {given!r}"
            )
        lengths.append(index)
    return tuple(lengths)


def _checked_names(names: Iterable[str], ndim: int) -> tuple[str, ...]:
    if isinstance(names, str):  # "dp" would be the axes "d" and "p"
        raise ConfigurationError(f"the names of axes are a sequence of strings, not {names!r}")
    given = _as_tuple(names, "the names of axes")
    if len(given) != ndim:
        raise ConfigurationError(f"a mesh with {ndim} axes has as many names, not {given!r}")
    for name in given:
        if not isinstance(name, str):
            raise ConfigurationError(f"the name of an axis is a string, not {name!r}")
        if given.count(name) > 1:
            raise ConfigurationError(f"the name {name!r} is given to several axes: {given!r}")
    return given


def _as_tuple(values: Iterable[Any], what: str) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise ConfigurationError(f"{what} are one value an axis, not {values!r}") from None
