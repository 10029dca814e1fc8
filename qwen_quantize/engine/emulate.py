"""A chip's products and casts under any torch program: `with emulate(arithmetic): ...`.

Torch shows every operation that reaches a kernel to a dispatch mode. This one takes matrix products of float32,
bfloat16 and float16 tensors, which linears, einsum, `@` and attention come down to, and computes them in the chip's
matrix unit; and casts to the element type of the arithmetic's scheme (`.to(torch.float8_e4m3fn)`), which it rounds as
the chip does. Everything else runs as before, gradients included: the products of a backward pass are products too.

Products become sums in the unit, then times alpha, plus beta times the addend in float32, then rounded to the result's
type: what a kernel's epilogue does. Fused attention would hide its products, so torch's decomposed one is selected. An
operation with products inside that are not emulated (a convolution, a product of FP8 tensors) is refused, not let by.
Slow: for numbers, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from qwen_quantize.chip_profiles.arithmetic import Arithmetic
from qwen_quantize.chip_profiles.dot_unit import dot_unit_of
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_path import CastStep, encode_along
from qwen_quantize.formats.cast_rule import CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.dot import emulated_matmul
from qwen_quantize.formats.dot_record import DotUnit
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat
from qwen_quantize.formats.tables import BF16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FP16, FP32, INT8

_aten = torch.ops.aten
_OPERANDS: dict[torch.dtype, FloatFormat] = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
_TARGETS: dict[torch.dtype, Format] = {
    torch.float8_e4m3fn: E4M3FN,
    torch.float8_e4m3fnuz: E4M3FNUZ,
    torch.float8_e5m2: E5M2,
    torch.float8_e5m2fnuz: E5M2FNUZ,
    torch.int8: INT8,
}
_ON_THE_WAY: dict[str, FloatFormat] = {"fp16": FP16, "bf16": BF16}
_IEEE = CastRule(Rounding.RNE, Overflow.NONSATURATE, Subnormals.KEEP)
# Operations with products inside that `emulate` does not compute.
_REFUSED = frozenset(
    (
        _aten.convolution,
        _aten._scaled_mm,
        _aten.addbmm,
        _aten._addmm_activation,
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
        _aten._cdist_forward,
        _aten._trilinear,
    )
)


@contextmanager
def emulate(arithmetic: Arithmetic, *, cast_operands: bool = False) -> Iterator[None]:
    """Products and casts inside the block are the chip's. Nested blocks: the innermost counts.

    Products use the accumulator of `arithmetic` whatever the type of their operands, which enter as they are; with
    `cast_operands` they are first cast to the scheme's element type by the chip's rule, without scales. UserError
    where the scheme has no activations to cast, and, inside the block, for an operation that is not emulated.
    """
    activation = SCHEMES[arithmetic.scheme].activation
    if cast_operands and activation is None:
        raise UserError(
            f"scheme {arithmetic.scheme} leaves activations as they are: there is no cast to emulate"
        )
    element = None if activation is None else activation.format
    with sdpa_kernel(SDPBackend.MATH), _Emulation(arithmetic, element, cast_operands):
        yield


class _Emulation(TorchDispatchMode):
    def __init__(self, arithmetic: Arithmetic, element: Format | None, cast_operands: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arithmetic = arithmetic
        self._element = element
        self._cast_operands = cast_operands
        self._units = {dtype: self._unit(fmt) for dtype, fmt in _OPERANDS.items()}

    def _unit(self, operand: FloatFormat) -> DotUnit | None:
        fmt = self._element if self._cast_operands else operand
        if not isinstance(fmt, FloatFormat | IntFormat):
            raise UserError(f"a product of {getattr(fmt, 'name', fmt)} operands is not emulated")
        return dot_unit_of(self._arithmetic, fmt, fmt, bit_true=True)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        options = dict(kwargs or {})
        packet = func.overloadpacket
        product = _PRODUCTS.get(packet)
        if product is not None and "out" not in func._overloadname:
            operands = [x for x in args if isinstance(x, Tensor)]
            if all(x.dtype in _OPERANDS for x in operands) and len({x.dtype for x in operands}) == 1:
                return product(self, *args, **options).to(operands[0].dtype)
        elif packet is _aten._to_copy and self._casts(args[0], options.get("dtype")):
            return self._cast(func, args[0], options)
        elif packet in _REFUSED and any(isinstance(x, Tensor) for x in args):
            raise UserError(
                f"{packet} multiplies inside one kernel and is not emulated; write it with matrix products, or move it "
                "out of the emulated block"
            )
        else:
            # In inference mode composite operations (linear, matmul) arrive whole.
            with self:
                result = func.decompose(*args, **options)
            if result is not NotImplemented:
                return result
        return func(*args, **options)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """float32 [M, N] of a [M, K] and b [K, N]."""
        unit = self._units[a.dtype]
        a, b = a.float(), b.float().T.contiguous()
        if self._cast_operands:
            assert self._element is not None
            rule = self._arithmetic.activation_cast
            a, b = (quantize_values(x.contiguous(), self._element, rule) for x in (a, b))
        return a @ b.T if unit is None else emulated_matmul(a, b, unit)

    def _casts(self, x: Tensor, dtype: torch.dtype | None) -> bool:
        return dtype in _TARGETS and _TARGETS[dtype] == self._element and x.dtype in _OPERANDS

    def _cast(self, func: Any, x: Tensor, options: dict[str, Any]) -> Tensor:
        dtype = options["dtype"]
        way = [CastStep(_ON_THE_WAY[name], _IEEE) for name in self._arithmetic.activation_path]
        target = CastStep(_TARGETS[dtype], self._arithmetic.activation_cast)
        codes = encode_along(x.float().contiguous(), [*way, target]).view(dtype)
        moved: Tensor = func(codes, **{**options, "dtype": None})  # to another device or layout, as asked
        return moved


def _epilogue(product: Tensor, addend: Tensor, beta: float, alpha: float) -> Tensor:
    """alpha * product + beta * addend in float32; as torch has it, beta = 0 ignores even a NaN in the addend."""
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        return scaled
    addend = addend.float()
    return scaled + (addend if beta == 1 else addend * beta)


def _mm(mode: _Emulation, a: Tensor, b: Tensor) -> Tensor:
    return mode.matmul(a, b)


def _bmm(mode: _Emulation, a: Tensor, b: Tensor) -> Tensor:
    if not a.shape[0]:
        return torch.zeros(0, a.shape[1], b.shape[2], device=a.device)
    return torch.stack([mode.matmul(x, y) for x, y in zip(a, b, strict=True)])


def _mv(mode: _Emulation, a: Tensor, b: Tensor) -> Tensor:
    return mode.matmul(a, b.unsqueeze(1)).squeeze(1)


def _dot(mode: _Emulation, a: Tensor, b: Tensor) -> Tensor:
    return mode.matmul(a.unsqueeze(0), b.unsqueeze(1)).reshape(())


def _addmm(mode: _Emulation, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _epilogue(_mm(mode, a, b), c, beta, alpha)


def _baddbmm(
    mode: _Emulation, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _epilogue(_bmm(mode, a, b), c, beta, alpha)


def _addmv(mode: _Emulation, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _epilogue(_mv(mode, a, b), c, beta, alpha)


_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    _aten.mm: _mm,
    _aten.bmm: _bmm,
    _aten.mv: _mv,
    _aten.dot: _dot,
    _aten.vdot: _dot,
    _aten.addmm: _addmm,
    _aten.baddbmm: _baddbmm,
    _aten.addmv: _addmv,
}
