"""Lines out of a stream of bytes. Pure."""

from __future__ import annotations

# A longer line is cut into several: no person reads it, and it must not fill the launcher's memory.
_MAX_LINE_NBYTES = 64 * 1024


class LineSplitter:
    r"""Bytes in pieces of any size in, whole lines out, without their ends.

    A line ends with ``\n`` or ``\r\n``, also with a lone ``\r``: progress bars redraw with that,
    and would not be seen before they are full. How the bytes were cut makes no difference.
    """

    def __init__(self, max_line_nbytes: int = _MAX_LINE_NBYTES) -> None:
        self._limit = max_line_nbytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes."""
        lines: list[bytes] = []
        if b"\n" not in data and b"\r" not in data and not self._pending.endswith(b"\r"):
            self._pending += data
        else:
            pieces = bytes(self._pending + data).splitlines(keepends=True)
            # A "\r" at the end may be half of "\r\n".
            self._pending = bytearray(b"" if pieces[-1].endswith(b"\n") else pieces.pop())
            for piece in pieces:
                self._add(lines, piece)
        while len(self._pending) - self._pending.endswith(b"\r") > self._limit:
            self._cut(lines, self._pending)
        return lines

    def finish(self) -> list[bytes]:
        """Return the last line, if it was not ended."""
        lines: list[bytes] = []
        if self._pending:
            self._add(lines, bytes(self._pending))
            self._pending.clear()
        return lines

    def _add(self, lines: list[bytes], piece: bytes) -> None:
        text = bytearray(piece.rstrip(b"\r\n"))
        while len(text) > self._limit:
            self._cut(lines, text)
        # Progress bars begin with "\r": there is no line before the first.
        if text or piece.endswith(b"\n"):
            lines.append(bytes(text))

    def _cut(self, lines: list[bytes], text: bytearray) -> None:
        end = self._limit
        while end > self._limit - 4 and text[end] & 0xC0 == 0x80:
            end -= 1  # not inside a UTF-8 character
        lines.append(bytes(text[:end]))
        del text[:end]
