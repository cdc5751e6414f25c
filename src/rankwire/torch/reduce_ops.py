"""What torch calls a reduction, in our words."""

from __future__ import annotations

from typing import Any

from torch.distributed import ReduceOp

from rankwire.collectives.premultiplied import PremulSum
from rankwire.errors import ConfigurationError

_OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "bitwise_and",
    ReduceOp.BOR: "bitwise_or",
    ReduceOp.BXOR: "bitwise_xor",
}


def op_of(reduce_op: Any) -> Any:
    """Return the op of a ``ReduceOp``.

    Raises:
        ConfigurationError: There is none.
    """
    op = _OPS.get(getattr(reduce_op, "op", reduce_op))
    if op is not None:
        return op
    if reduce_op == ReduceOp.PREMUL_SUM:
        return PremulSum(reduce_op.factor)
    raise ConfigurationError(f"there is no reduction {reduce_op} here")
