"""The segment: shared memory in which the ranks of a group on one host exchange data in steps.

A small collective on one host consists of *steps*, the same on all ranks. In a step, a rank writes
its bytes into its *slot* and then *publishes* the step with the tag of the operation
(``collectives.exchange``); the other ranks wait for that and read the slot.

Every rank has two slots, for even and odd steps, so that one can be written while the other is
read. A rank that writes step k overwrites step k - 2, so it waits until all others have published
k - 1. After most steps this is known already.

The memory, little-endian::

    ======  ==============================================================================
    offset  what
    ======  ==============================================================================
    192     a word that is free for the processes that share the memory
    256     a line of 128 bytes for each rank, which that rank alone writes:
            the last step that it has published; whether it sleeps until another one does;
            the tags of its last even and odd step; the bytes that are in their slots
    then    the slots, at multiples of 4096: of even steps by rank, of odd ones by rank
    ======  ==============================================================================

One store of eight bytes publishes a step, after its bytes, tag and size. This is correct on
processors that keep stores in order (x86); the owner uses segments nowhere else. A rank that dies
before the store has published nothing.
"""

from __future__ import annotations

_LINES = 256
_LINE_NBYTES = 128
_ALIGN = 4096
_LARGEST_SLOT = 2 << 20  # larger arrays are read out of a rank's memory
# Indices of the words in a line, whose word 0 is the last published step. Of two words, the first
# is for even steps.
ASLEEP, _TAGS, _SIZES = 1, 2, 4
_RETRACTED = 0  # instead of a tag
SEGMENT_SIZES = range(_LINES, 1 << 34)


def segment_nbytes(slots_nbytes: int, size: int) -> int:
    """Return the size of a segment of ``size`` ranks; 0 if the slots would be too small."""
    slot = min(slots_nbytes // (2 * size) // _ALIGN * _ALIGN, _LARGEST_SLOT)
    return _slots_at(size) + 2 * size * slot if slot else 0


def is_segment_of(size: int, nbytes: int) -> bool:
    """Return whether memory of ``nbytes`` can be the segment of ``size`` ranks."""
    return segment_nbytes(nbytes - _slots_at(size), size) == nbytes


def _slots_at(size: int) -> int:
    return (_LINES + size * _LINE_NBYTES + _ALIGN - 1) // _ALIGN * _ALIGN


class Segment:
    """One rank's view of a segment, whose memory was zeroed before any rank began.

    One thread at a time.

    Attributes:
        words: The lines, for code that cannot afford a call.
        lines: The index in ``words`` where the line of each rank begins.
        others: The same for all ranks but this one.
        step: The last step that this rank has begun.
        slots: The slots of all ranks for even steps, and for odd steps.
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
        """Begin the next step; return False if all others must first publish the step before."""
        self.step += 1
        return not self._behind

    def publish(self, tag: int, nbytes: int = 0) -> None:
        """Publish that this rank's slot is written."""
        words, mine, odd = self.words, self._mine, self.step & 1
        words[mine + _TAGS + odd] = tag
        words[mine + _SIZES + odd] = nbytes
        words[mine] = self.step
        self._behind = True

    def retract(self, tag: int) -> None:
        """Retract the step that this rank has published last, if it has this tag."""
        at = self._mine + _TAGS + (self.step & 1)
        if self.words[at] == tag:  # else it belongs to an earlier operation, which succeeded
            self.words[at] = _RETRACTED

    def all_came(self, tag: int) -> bool:
        """Return whether all other ranks have published this step with this tag."""
        words, step = self.words, self.step
        at_tag = _TAGS + (step & 1)
        for line in self.others:
            if words[line] < step or words[line + at_tag] != tag:
                return False
        self._behind = False
        return True

    def has_come(self, rank: int, step: int) -> bool:
        """Return whether a rank has published a step, with any tag."""
        return self.words[self.lines[rank]] >= step

    def came(self, rank: int, tag: int) -> bool:
        """Return whether a rank has published this step with this tag."""
        return self.has_come(rank, self.step) and self.tag_of(rank) == tag

    def tag_of(self, rank: int) -> int:
        """Return the tag of a rank that has published this step."""
        return self.words[self.lines[rank] + _TAGS + (self.step & 1)]

    def nbytes_of(self, rank: int) -> int:
        """Return the size of the data of a rank that has published this step."""
        return self.words[self.lines[rank] + _SIZES + (self.step & 1)]
