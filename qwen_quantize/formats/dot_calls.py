"""The kernel of dot.c as a Python function. Callers have checked dtypes and shapes and made tensors contiguous."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.formats.dot_operands import Exponents
from qwen_quantize.formats.dot_record import DotUnit, Joining, Order, SumOverflow
from qwen_quantize.formats.native import load_native
from qwen_quantize.formats.spec import FloatFormat

SOURCE = Path(__file__).with_name("dot.c")
_ALONE = 1 << 16  # products that one thread does sooner than it wakes a second

# The constants of dot.c.
_ORDERS = {Order.ALIGNED: 0, Order.FMA: 1, Order.PAIRWISE: 2}
_JOININGS = {Joining.WITH_PRODUCTS: 0, Joining.TWO_STAGE: 1, Joining.SEPARATE: 2}
_ROUNDINGS = {Rounding.RNE: 0, Rounding.RNA: 1, Rounding.RTZ: 2, Rounding.FLOOR: 3, Rounding.CEIL: 4}
_NARROW, _WIDE, _EXPANSION = range(3)
_NEVER = -(1 << 20)  # an exponent below all others

_FIELDS = (
    *("order", "joining", "path", "products", "fraction_bits"),
    *("alignment_rounding", "normalised", "lanes", "mantissa_bits", "min_exponent", "final_rounding"),
    *("saturate", "flush_outputs", "promotion_interval"),
    *("min_alignment_exponent", "sum_fraction_bits", "c_fraction_bits", "join_rounding", "c_dropped_below"),
    "max_product_exponent",
)


class _Unit(ctypes.Structure):
    """The image of `struct unit` in dot.c."""

    _fields_ = (*((name, ctypes.c_int32) for name in _FIELDS), ("max_value", ctypes.c_double))


def dot_library() -> ctypes.CDLL | None:
    """The compiled kernel, or None (no compiler, or switched off): use the torch twin then."""
    library = load_native(SOURCE, libraries=("-lm",))
    if library is not None:
        _declare(library)
    return library


@functools.cache
def _declare(library: ctypes.CDLL) -> None:
    pointer, i64 = ctypes.c_void_p, ctypes.c_int64
    library.qq_dot.argtypes = (
        ctypes.POINTER(_Unit), *(pointer,) * 7, i64, i64, i64, ctypes.c_int32,
    )  # fmt: skip
    library.qq_dot.restype = None


def _path(unit: DotUnit, left: Exponents, right: Exponents) -> int:
    """How dot.c holds products and their sum without rounding errors."""
    if unit.fraction_bits is None or unit.fraction_bits + 2 + (unit.products or 1).bit_length() > 53:
        return _EXPANSION
    smallest, largest = left.smallest + right.smallest, left.largest + right.largest
    formats = (unit.a_format, unit.b_format)
    short = all(isinstance(fmt, FloatFormat) and fmt.mantissa_bits <= 11 for fmt in formats)
    in_range = smallest >= -90 and largest <= 100 and largest - smallest <= 90
    return _NARROW if short and in_range and unit.fraction_bits <= 28 else _WIDE


def _native_unit(unit: DotUnit, left: Exponents, right: Exponents) -> _Unit:
    stage = unit.two_stage
    return _Unit(
        order=_ORDERS[unit.order],
        joining=_JOININGS[unit.joining],
        path=_path(unit, left, right),
        products=unit.products or 0,
        fraction_bits=-1 if unit.fraction_bits is None else unit.fraction_bits,
        alignment_rounding=_ROUNDINGS[unit.alignment_rounding],
        normalised=int(unit.products_normalised),
        lanes=unit.lanes,
        mantissa_bits=unit.mantissa_bits,
        min_exponent=unit.min_exponent,
        final_rounding=_ROUNDINGS[unit.final_rounding],
        saturate=int(unit.overflow is SumOverflow.SATURATE),
        flush_outputs=int(unit.flush_outputs),
        promotion_interval=unit.promotion_interval or 0,
        min_alignment_exponent=_NEVER if unit.min_alignment_exponent is None else unit.min_alignment_exponent,
        sum_fraction_bits=0 if stage is None else stage.sum_fraction_bits,
        c_fraction_bits=0 if stage is None else stage.register_fraction_bits,
        join_rounding=0 if stage is None else _ROUNDINGS[stage.rounding],
        c_dropped_below=-_NEVER if stage is None or stage.dropped_below is None else stage.dropped_below,
        max_product_exponent=left.largest + right.largest,
        max_value=unit.max_value,
    )


def dot(
    library: ctypes.CDLL,
    unit: DotUnit,
    a: Tensor,
    left: Exponents,
    strips: Tensor,
    right: Exponents,
    c: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Finite a [M, K] times the packed strips into out [M, N]; bool [M, N] of the outputs left to the twin.

    `right` holds packed exponents. All float32 but the exponents; c [M, N] or None.
    """
    rows, columns = out.shape
    undecided = torch.empty(rows, columns, dtype=torch.bool)
    native = _native_unit(unit, left, right)
    products = rows * columns * a.shape[1]
    threads = torch.get_num_threads() if products > _ALONE else 1
    library.qq_dot(
        ctypes.byref(native), a.data_ptr(), left.values.data_ptr(), strips.data_ptr(),
        right.values.data_ptr(), None if c is None else c.data_ptr(), out.data_ptr(),
        undecided.data_ptr(), rows, columns, a.shape[1], threads,
    )  # fmt: skip
    return undecided
