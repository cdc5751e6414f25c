"""Buffers that hold references are told from those that do not."""

import array
import ctypes

import numpy as np
import pytest

from rankwire.codec.arrays import holds_references
from rankwire.codec.codec import Codec
from rankwire.errors import UnsupportedTypeError


class Refers(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("thing", ctypes.py_object))


class Inherits(Refers):
    _fields_ = (("more", ctypes.c_int),)


class Either(ctypes.Union):
    _fields_ = (("number", ctypes.c_int64), ("thing", ctypes.py_object))


class Packed(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("flag", ctypes.c_char), ("inner", Either))


class Numbers(ctypes.Structure):
    _fields_ = (("O", ctypes.c_int), ("P", ctypes.c_double * 3))


RECORD = np.zeros(2, dtype=[("thing", object), ("number", "d")])

REFERRING = {
    "objects": np.array([None, "a"]),
    "no objects": np.array([], dtype=object),
    "record": RECORD,
    "other fields of a record": RECORD[["number"]],
    "nested record": np.zeros(2, dtype=[("x", [("y", object, (2,))])]),
    "object as a field of bytes": memoryview(np.array([None])).cast("B"),
    "py_object": (ctypes.py_object * 2)(),
    "void pointer": (ctypes.c_void_p * 2)(),
    "char pointer": (ctypes.c_char_p * 2)(),
    "wide char pointer": (ctypes.c_wchar_p * 2)(),
    "pointer": (ctypes.POINTER(ctypes.c_int) * 2)(),
    "function": (ctypes.CFUNCTYPE(None) * 2)(),
    "structure": Refers(),
    "inheriting structure": Inherits(),
    "union": Either(),
    "packed structure": (Packed * 2)(),
}

PLAIN = {
    "bytes": b"OPz",
    "bytearray": bytearray(b"OPz"),
    "numbers": np.zeros(3),
    "complex": np.zeros(3, complex),
    "text": np.zeros(3, "U5"),
    "void": np.zeros(3, "V8"),
    "array": array.array("d", [1.0]),
    "record": np.zeros(2, dtype=[("O", "d"), ("P&zZ", "c16")]),
    "fields of a record": np.zeros(2, dtype=[("O", "d"), ("n", "d")])[["n"]],
    "structure": Numbers(),
    "ctypes array": (ctypes.c_double * 4)(),
    "view": memoryview(bytearray(8)).cast("d"),
}


@pytest.mark.parametrize("name", REFERRING)
def test_buffers_that_hold_references_are_found(name):
    assert holds_references(memoryview(REFERRING[name]))
    assert holds_references(memoryview(memoryview(REFERRING[name])))


@pytest.mark.parametrize("name", PLAIN)
def test_buffers_without_references_are_accepted(name):
    assert not holds_references(memoryview(PLAIN[name]))


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_view_of_references_is_no_argument(size):
    with pytest.raises(UnsupportedTypeError, match="references"):
        Codec().encode([memoryview(np.array([None] * size))])
