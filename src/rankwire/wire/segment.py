"""The segment: memory in which the ranks of a group on one host meet, step by step.

A message takes two system calls and a good deal of Python on its way; a word in memory that all
ranks have takes neither. So a small collective of one host is made of *steps*, the same ones on all
ranks. In a step a rank puts its bytes into a *slot* of its own and then *publishes* the step, with
the tag of the operation (``collectives.fingerprints``); others wait for that and read the slot.

Every rank has two slots, for steps of even and of odd number: one can be written while the other is
read. Who writes step k overwrites k - 2, so it waits until all others have published k - 1: they
are done with k - 2 by then. After most steps that is known already, because they were waited for.

The memory, little-endian::

    ======  ==============================================================================
    offset  what
    ======  ==============================================================================
    192     a word that is left to those who share the memory
    256     a line of 128 bytes for each rank, which that rank alone writes:
            the last step that it has published; whether it sleeps until another one does;
            the tags of its last even and odd step; the bytes that are in their slots
    then    the slots, at multiples of 4096: of even steps by rank, of odd ones by rank
    ======  ==============================================================================

A step is published by one store of eight bytes, after its bytes, tag and size. That is right on
processors that keep stores in order (x86); the owner sees to it that a segment is used nowhere
else. A rank that dies before has published nothing; what it has published is whole. Pure: memory
in, bytes out. How a rank waits is the business of ``links.shared_segment``.
"""

from __future__ import annotations

_LINES = 256
_LINE_NBYTES = 128
_ALIGN = 4096
_LARGEST_SLOT = 2 << 20  # from there on arrays are read straight out of a rank's memory
# Which word of a line is what; of two, the first is that of even steps.
ASLEEP, _TAGS, _SIZES = 1, 2, 4  # the first is the last step that it has published
_RETRACTED = 0  # instead of a tag
SEGMENT_SIZES = range(_LINES, 1 << 34)


def segment_nbytes(slots_nbytes: int, size: int) -> int:
    """Return how much memory a segment takes; 0 if so little is left to each rank that it is none.

    Args:
        slots_nbytes: For the slots of all ranks together, at most.
        size: How many ranks.
    """
    slot = min(slots_nbytes // (2 * size) // _ALIGN * _ALIGN, _LARGEST_SLOT)
    return _slots_at(size) + 2 * size * slot if slot else 0


def is_segment_of(size: int, nbytes: int) -> bool:
    """Whether memory of so many bytes can be the segment of so many ranks."""
    return segment_nbytes(nbytes - _slots_at(size), size) == nbytes


def _slots_at(size: int) -> int:
    return (_LINES + size * _LINE_NBYTES + _ALIGN - 1) // _ALIGN * _ALIGN


class Segment:
    """One rank's end of a segment. One thread at a time.

    Args:
        memory: All of it, zeroed before any rank began.
        rank: This rank.
        size: How many there are.

    Attributes:
        words: The lines, for those who cannot afford a function.
        lines: At which word the line of each rank begins.
        others: The same of all but this one.
        step: The last one that this rank has begun.
        slots: Those of all ranks for even steps, and for odd ones.
        slot_nbytes: The most that a rank can put into a slot.
    """

    def __init__(self, memory: memoryview, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.words = memory[: _slots_at(size)].cast("Q")
        self.lines = [(_LINES + at * _LINE_NBYTES) // 8 for at in range(size)]
        self._mine = self.lines[rank]
        self.others = [line for line in self.lines if line != self._mine]
        start = _slots_at(size)
        self.slot_nbytes = nbytes = (len(memory) - start) // (2 * size)
        slots = [memory[start + at * nbytes :][:nbytes] for at in range(2 * size)]
        self.slots = slots[:size], slots[size:]
        self.step = 0
        self._behind = False  # whether others may not have published the last step yet

    def begin(self) -> bool:
        """Begin the next step; return whether its slot can be written at once.

        If not, all others have to be waited for, until they have published the step before.
        """
        self.step += 1
        return not self._behind

    def publish(self, tag: int, nbytes: int = 0) -> None:
        """Tell that this rank's slot is written."""
        words, mine, odd = self.words, self._mine, self.step & 1
        words[mine + _TAGS + odd] = tag
        words[mine + _SIZES + odd] = nbytes
        words[mine] = self.step
        self._behind = True

    def retract(self, tag: int) -> None:
        """Take back what this rank has published last, if it is this: who comes now has to ask."""
        at = self._mine + _TAGS + (self.step & 1)
        if self.words[at] == tag:  # else it is of an operation before, which went well
            self.words[at] = _RETRACTED

    def all_came(self, tag: int) -> bool:
        """Whether all others have published this step, and under this tag."""
        words, step = self.words, self.step
        at_tag = _TAGS + (step & 1)
        for line in self.others:
            if words[line] < step or words[line + at_tag] != tag:
                return False
        self._behind = False
        return True

    def has_come(self, rank: int, step: int) -> bool:
        """Whether a rank has published a step, under whatever tag."""
        return self.words[self.lines[rank]] >= step

    def came(self, rank: int, tag: int) -> bool:
        """Whether a rank has published this step, and under this tag."""
        return self.has_come(rank, self.step) and self.tag_of(rank) == tag

    def tag_of(self, rank: int) -> int:
        """Return the tag of a rank that has published this step."""
        return self.words[self.lines[rank] + _TAGS + (self.step & 1)]

    def nbytes_of(self, rank: int) -> int:
        """Return how much a rank that has published this step had for its slot."""
        return self.words[self.lines[rank] + _SIZES + (self.step & 1)]
