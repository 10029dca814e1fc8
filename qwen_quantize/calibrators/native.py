"""The calibrators' compiled inner loops and their torch twins, which give the same bits."""

from __future__ import annotations

import ctypes
import importlib.resources
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from qwen_quantize.formats.native import load_native

_POINTER = ctypes.POINTER(ctypes.c_float)
_HISTOGRAM_BINS = 2048


def _library() -> ctypes.CDLL | None:
    source = importlib.resources.files("qwen_quantize.calibrators") / "kernels.c"
    return load_native(Path(str(source)))


def _floats(tensor: Tensor, offset: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() + 4 * offset)


def error_feedback(
    weights: Tensor,
    first: int,
    factor: Tensor,
    scale: Tensor,
    mantissa_bits: int,
    emin: int,
    maximum: float,
) -> Tensor:
    """Quantize columns of `weights` in place, left to right, feeding each error to the columns behind it.

    weights: [rows, K] float32, contiguous; factor: [width, width] float32 upper triangular; scale:
    [rows, width] float32 powers of two. Columns first .. first + width - 1 become quantized values.
    Returns the errors divided by the factor's diagonal, [rows, width], with which the caller updates the
    columns behind the block.
    """
    rows, columns = weights.shape
    width = factor.shape[0]
    errors = torch.empty(rows, width)
    library = _library()
    if library is None:
        _error_feedback_torch(weights, first, factor, scale, mantissa_bits, emin, maximum, errors)
        return errors
    threads = max(1, min(torch.get_num_threads(), rows // 16))
    bounds = [rows * i // threads for i in range(threads + 1)]

    def run(part: int) -> None:
        begin, end = bounds[part], bounds[part + 1]
        library.error_feedback(
            _floats(weights, begin * columns),
            ctypes.c_int64(columns),
            ctypes.c_int64(first),
            ctypes.c_int64(width),
            ctypes.c_int64(end - begin),
            _floats(factor),
            _floats(scale, begin * width),
            ctypes.c_int(mantissa_bits),
            ctypes.c_int(emin),
            ctypes.c_float(maximum),
            _floats(errors, begin * width),
        )

    if threads == 1:
        run(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, range(threads)))
    return errors


def _error_feedback_torch(
    weights: Tensor,
    first: int,
    factor: Tensor,
    scale: Tensor,
    mantissa_bits: int,
    emin: int,
    maximum: float,
    errors: Tensor,
) -> None:
    width = factor.shape[0]
    block = weights[:, first : first + width]
    for i in range(width):
        scaled = (block[:, i] / scale[:, i]).clamp(-maximum, maximum)
        exponent = ((scaled.view(torch.int32) >> 23) & 255).sub_(127).clamp_(min=emin)
        step = torch.ldexp(torch.ones_like(scaled), exponent - mantissa_bits)
        quantized = ((scaled / step).round() * step).clamp(-maximum, maximum) * scale[:, i]
        error = (block[:, i] - quantized) / factor[i, i]
        errors[:, i] = error
        block[:, i] = quantized
        block[:, i + 1 :] -= error.unsqueeze(1) * factor[i, i + 1 :]


def exponent_mantissa_histogram(x: Tensor) -> Tensor:
    """[256, 8] int64: how often each float32 exponent field and top three mantissa bits occur in `x`."""
    x = x.contiguous()
    library = _library()
    if library is None:
        bins = (x.view(torch.int32).flatten() >> 20) & (_HISTOGRAM_BINS - 1)
        return torch.bincount(bins, minlength=_HISTOGRAM_BINS).view(256, 8)
    counts = torch.zeros(_HISTOGRAM_BINS, dtype=torch.int64)
    library.exponent_mantissa_histogram(
        _floats(x), ctypes.c_int64(x.numel()), ctypes.c_void_p(counts.data_ptr())
    )
    return counts.view(256, 8)
