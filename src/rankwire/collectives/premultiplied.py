"""Premultiplied sums: every rank multiplies what it contributes by a factor of its own.

The factor is nobody else's business: it is not compared between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Complex
from typing import Any, Literal, TypeAlias

import numpy as np

from rankwire.collectives.reductions import Array, OpName, Reduction, quietly
from rankwire.errors import ConfigurationError

NAME = "premul_sum"


@dataclass(frozen=True)
class PremulSum:
    """The op of a sum of ``factor * array``; for floats and complex numbers.

    Args:
        factor: This rank's: a number, or an array or tensor of one element, which is read when the
            operation is called. Other ranks may have another one.
    """

    factor: Any


# What users may pass as ``op=``.
Op: TypeAlias = OpName | PremulSum | tuple[Literal["premul_sum"], Any]


def name_of(op: Any) -> str:
    """Return what all ranks call an op.

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(op, str):
        return op
    factor_of(op)
    return NAME


def factor_of(op: Any) -> complex:
    """Return the factor of a premultiplied sum, as a number that has no dtype.

    Raises:
        ConfigurationError: It is no such op, or its factor is no number.
    """
    match op:
        case PremulSum(factor) | ("premul_sum", factor):
            pass
        case _:
            raise ConfigurationError(
                f"an op is a name such as 'sum', or PremulSum(factor), not {op!r}"
            )
    try:
        number = factor.item() if hasattr(factor, "item") else factor
    except (ValueError, RuntimeError) as error:  # numpy's and torch's, if there are several
        raise ConfigurationError(f"a factor is one number: {error}") from error
    if not isinstance(number, Complex):
        raise ConfigurationError(f"a factor is a number, or an array of one, not {factor!r}")
    return complex(number) if isinstance(number, complex) else float(number)  # type: ignore[arg-type]


class PremultipliedSum(Reduction):
    """A sum on one dtype, with this rank's factor.

    Raises:
        ConfigurationError: The factor means nothing for the dtype.
    """

    def __init__(self, dtype: np.dtype[Any], factor: complex, *, is_bfloat16: bool) -> None:
        if not is_bfloat16 and dtype.kind not in "fc":
            raise ConfigurationError(
                f"op {NAME!r} on {dtype.name}: it is for floats and complex numbers"
            )
        if isinstance(factor, complex) and dtype.kind != "c":
            raise ConfigurationError(f"a complex factor {factor} for elements that are not")
        super().__init__("sum", dtype, is_bfloat16=is_bfloat16)
        self.op = NAME
        self._factor = factor

    def contribution(self, own: Array) -> Array:
        """Return what this rank contributes, in memory of its own.

        float16 and bfloat16 are multiplied in float32 and rounded.
        """
        result = np.empty_like(own)
        quietly(self._multiply, own, result)
        return result

    def _multiply(self, own: Array, result: Array) -> None:
        if self._widen is None:
            np.multiply(own, self._factor, out=result)
        else:
            self._narrow(self._widen(own) * self._factor, result)
