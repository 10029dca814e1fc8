"""The product of two matrices as a matrix unit computes it, bit by bit.

A matrix unit does not add float32 numbers. It takes a block of products, shifts them to the largest exponent
among them, cuts what falls off the end, adds the rest as integers and rounds once; the result enters the next
block. A `DotUnit` states everything that decides the bits of D = A B^T + C on such a unit. One step of the
ALIGNED order, with a block of L products p_i and the sum c so far:

1. Products are exact. The exponent of p_i is the sum of its factors' exponents, so its significand lies in
   [1, 4), or below 1 for subnormal factors; with `products_normalised` it is the product's own. Zeros have
   no exponent.
2. E is the largest exponent, of c too where c joins WITH_PRODUCTS, and not below `min_alignment_exponent`.
3. Every term becomes a multiple of 2^(E - fraction_bits), by `alignment_rounding`. Without fraction bits
   nothing is cut.
4. The terms are added exactly, and the sum is rounded once to the register by `final_rounding`.

Blocks run in ascending K; the last may be short. A sum that is exactly zero is +0; one that rounds to zero
keeps its sign. NaN, infinity times zero, and infinities of both signs in one sum give the NaN `nan_bits`; a
single infinity stays. The float32 orders follow IEEE 754 in all this, but for `nan_bits`. (The model: Fasi,
Higham, Mikaitis, Pranesh, PeerJ CS 7:e330; Khattak, Mikaitis, arXiv 2512.07004; MMA-Sim, arXiv 2511.10909.)

The compiled kernel (dot.c), its torch twin (dot_twin.py) and the slow oracle (dot_reference.py) agree bit for
bit. dot_units.py lists the units whose numbers are published.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.formats import dot_calls
from qwen_quantize.formats.codec import check_float32
from qwen_quantize.formats.dot_integers import integer_dot
from qwen_quantize.formats.dot_operands import (
    Exponents,
    RightOperand,
    find_exponents,
    in_strips,
    inputs_of,
    without_bad_rows,
)
from qwen_quantize.formats.dot_record import DotUnit, Register
from qwen_quantize.formats.dot_twin import dots_by_twin, matmul_by_twin


def prepare_right(b: Tensor, unit: DotUnit) -> RightOperand:
    """b [N, K], float32 values of `unit.b_format`, prepared for many products with `unit`.

    It keeps 6 bytes for each element beside b where the kernel will be used, else nothing. ValueError: b is
    not a float32 matrix, or holds values that the format cannot.
    """
    b = inputs_of(b, unit.b_format, unit, "b")
    if unit.is_plain or unit.register is Register.INT32:
        return RightOperand(unit, b, None, None, None)
    finite, bad_rows = without_bad_rows(b)
    if not _uses_kernel(b):
        return RightOperand(unit, b, None, None, bad_rows)
    exponents = find_exponents(finite, unit.b_format)
    packed = Exponents(in_strips(exponents.values), exponents.smallest, exponents.largest)
    return RightOperand(unit, b, in_strips(finite), packed, bad_rows)


def emulated_matmul(a: Tensor, b: Tensor | RightOperand, unit: DotUnit, c: Tensor | None = None) -> Tensor:
    """float32 [M, N]: a [M, K] times b [N, K] transposed, plus c [M, N], with the bits that `unit` gives.

    a, b: float32 values of the unit's formats (any float32 where it rounds its inputs); c: float32 values of
    the register, zero when None. b may come from `prepare_right`. An int32 sum is converted to float32, to
    nearest; `emulated_integer_matmul` gives it as it is. A unit that `is_plain` uses torch's product. For any
    device; ValueError for wrong dtypes, shapes or values.
    """
    if unit.register is Register.INT32:
        return emulated_integer_matmul(a, b, unit, c).to(torch.float32)
    right = b if isinstance(b, RightOperand) else prepare_right(b, unit)
    a, c = _checked(a, right, unit, c)
    if unit.is_plain:
        product = a @ right.values.T
        return _flushed_to_normal(product if c is None else product + c, unit)
    if unit.flush_inputs and c is not None:
        c = torch.where(c.abs() < 2.0**unit.min_exponent, 0.0, c)
    library = None if right.strips is None else dot_calls.dot_library()
    if library is None or right.strips is None or right.exponents is None or not _uses_kernel(a):
        return _one_nan(matmul_by_twin(a, right.values, c, unit), unit)
    finite, bad_rows = without_bad_rows(a)
    left = find_exponents(finite, unit.a_format)
    if unit.products_overflow and left.largest + right.exponents.largest + 2 > 128:
        return _one_nan(matmul_by_twin(a, right.values, c, unit), unit)
    out = torch.empty(a.shape[0], right.values.shape[0])
    finite_c = None if c is None else torch.where(c.isfinite(), c, 0.0)
    undecided = dot_calls.dot(library, unit, finite, left, right.strips, right.exponents, finite_c, out)
    if bad_rows is not None:
        undecided |= bad_rows[:, None]
    if right.bad_rows is not None:
        undecided |= right.bad_rows[None, :]
    if c is not None:
        undecided |= ~c.isfinite()
    if bool(undecided.any()):
        rows, columns = undecided.nonzero(as_tuple=True)
        start = torch.zeros(rows.numel()) if c is None else c[rows, columns]
        _fill(out, rows, columns, a, right.values, start, unit)
    return _one_nan(out, unit)


def emulated_integer_matmul(
    a: Tensor, b: Tensor | RightOperand, unit: DotUnit, c: Tensor | None = None
) -> Tensor:
    """int32 [M, N] of a unit with an int32 register; arguments as for `emulated_matmul`, c int32 or float32."""
    if unit.register is not Register.INT32:
        raise ValueError(f"dot unit {unit.name} does not add integers")
    right = b if isinstance(b, RightOperand) else prepare_right(b, unit)
    a, c = _checked(a, right, unit, c)
    return integer_dot(a, right.values, unit, c)


def _uses_kernel(x: Tensor) -> bool:
    return x.device.type == "cpu" and dot_calls.dot_library() is not None


def _checked(a: Tensor, right: RightOperand, unit: DotUnit, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if right.unit != unit:
        raise ValueError(f"b was prepared for unit {right.unit.name}, not for {unit.name}")
    a = inputs_of(a, unit.a_format, unit, "a")
    (rows, k), (columns, right_k) = a.shape, right.values.shape
    if k != right_k:
        raise ValueError(f"a has {k} columns and b has {right_k}: both must be the K of the product")
    if c is None:
        return a, None
    if c.shape != (rows, columns):
        raise ValueError(f"c must be of shape {(rows, columns)}, not {tuple(c.shape)}")
    if unit.register is not Register.INT32:
        check_float32(c, "c")
    return a, c.contiguous()


def _fill(out: Tensor, rows: Tensor, columns: Tensor, a: Tensor, b: Tensor, c: Tensor, unit: DotUnit) -> None:
    """Let the twin compute out[rows, columns]; in pieces, because each takes a row of a and of b."""
    step = max((1 << 22) // max(a.shape[1], 1), 1)
    for first in range(0, rows.numel(), step):
        i, j = rows[first : first + step], columns[first : first + step]
        out[i, j] = dots_by_twin(a[i], b[j], c[first : first + step], unit)


def _one_nan(x: Tensor, unit: DotUnit) -> Tensor:
    """x with every NaN replaced by the unit's, in place."""
    nan = x.isnan()
    if bool(nan.any()):
        pattern = unit.nan_bits - (1 << 32) if unit.nan_bits >= 1 << 31 else unit.nan_bits
        x.view(torch.int32).masked_fill_(nan, pattern)
    return x


def _flushed_to_normal(x: Tensor, unit: DotUnit) -> Tensor:
    if not unit.flush_outputs:
        return x
    return torch.where(x.abs() < 2.0**unit.min_exponent, torch.copysign(torch.zeros_like(x), x), x)
