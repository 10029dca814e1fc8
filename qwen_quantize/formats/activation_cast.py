"""What a chip makes of a linear's input: the casts of activations, one small record for each way of scaling.

Each maps [..., K] float32 to the same shape: the values that the matrix unit sees, times their scales. A unit that
sums in few bits has to be fed what it is fed on the chip, codes or codes with the scales that it applies itself;
`operands` takes the scale that is applied to finished sums apart from those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from qwen_quantize.formats.cast_path import CastStep, cast_along
from qwen_quantize.formats.cast_rule import CastRule
from qwen_quantize.formats.codec import check_float32
from qwen_quantize.formats.groups import fake_quantize_groups
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.scaled_groups import ON_THE_WAY, ScaleSearch, quantize_scaled, search_for
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat
from qwen_quantize.formats.tables import E4M3FN, FP32
from qwen_quantize.formats.unrounded_scales import fake_quantize_unrounded

_WHOLE = IntFormat("int22", 22, -(1 << 21), (1 << 21) - 1)  # wide enough before the zero point is added
_NVFP4_RANGE = 6.0 * 448.0


class ActivationCast(Protocol):
    """The cast of a linear's input."""

    @property
    def format(self) -> Format:
        """The element type of the codes."""
        ...

    @property
    def rounds_scales(self) -> bool:
        """Whether scales are kept in fewer bits than a float32 has."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(what the unit reads, [..., K]; what its sums are multiplied with, broadcasts against [..., 1])."""
        ...

    def unrounded(self) -> ActivationCast:
        """The same cast as if its scales were float32."""
        ...


@dataclass(frozen=True, slots=True)
class GroupCast:
    """Dynamic power-of-two scales: per token, in groups of `group_size` along the features.

    unrounded_scales: as if scales were float32 instead of powers of two; `scale_rule` does not count then.
    """

    format: Format
    rule: CastRule
    scale_rule: ScaleRule
    group_size: int
    unrounded_scales: bool = False

    @property
    def rounds_scales(self) -> bool:
        return not self.unrounded_scales

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if self.unrounded_scales:
            return fake_quantize_unrounded(flat, self.format, self.rule, self.group_size).view(x.shape)
        cast = fake_quantize_groups(flat, self.format, self.rule, self.scale_rule, self.group_size)
        return cast.reshape(x.shape)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self(x), None

    def unrounded(self) -> GroupCast:
        return replace(self, unrounded_scales=True)


@dataclass(frozen=True, slots=True)
class TokenCast:
    """Dynamic scales with a mantissa: one for each token, or for `group_size` of its features.

    path: types that a scaled value is rounded to before it becomes a code (fp16 on Ascend). The scale is that of
    scaled_groups.py: of vLLM's kernels, INT8 codes staying within -127 .. 127.
    """

    format: Format
    rule: CastRule
    scale_format: FloatFormat = FP32
    group_size: int | None = None
    path: tuple[FloatFormat, ...] = ()

    @property
    def rounds_scales(self) -> bool:
        return self.scale_format != FP32

    @property
    def search(self) -> ScaleSearch:
        return search_for(self.format, self.scale_format, self.group_size, self.path)

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return quantize_scaled(flat, self.format, self.rule, self.search)[0].view(x.shape)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """With one scale per token: codes, and the scales. With groups the scales are in the values."""
        if self.group_size is not None:
            return self(x), None
        flat = x.reshape(-1, x.shape[-1])
        codes, scales = quantize_scaled(flat, self.format, self.rule, self.search, scaled=False)
        return codes.view(x.shape), scales.view(*x.shape[:-1], 1)

    def unrounded(self) -> TokenCast:
        return replace(self, scale_format=FP32)


@dataclass(frozen=True, slots=True)
class TensorCast:
    """One scale for all tokens, found in calibration: codes are the cast of x / scale.

    INT8 codes may reach -128; floats stay within the largest finite value. What is not finite is treated as the
    cast has it, element by element.
    """

    format: Format
    rule: CastRule
    scale: float
    path: tuple[FloatFormat, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.scale < float("inf"):
            raise ValueError(f"the scale of activations must be positive and finite, found {self.scale}")

    @property
    def rounds_scales(self) -> bool:
        return False

    def __call__(self, x: Tensor) -> Tensor:
        codes, scale = self.operands(x)
        return codes * scale

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.tensor(self.scale, dtype=torch.float32, device=x.device)
        codes = x / scale
        if not isinstance(self.format, IntFormat):
            codes = codes.clamp(-self.format.max, self.format.max)
        codes = cast_along(codes, [CastStep(step, ON_THE_WAY) for step in self.path])
        return quantize_values(codes, self.format, self.rule), scale.reshape(1)

    def unrounded(self) -> TensorCast:
        return self


@dataclass(frozen=True, slots=True)
class WholeCast:
    """As `TensorCast`, its scale from the tensor at hand: the largest magnitude becomes the largest code.

    What calibration works with before it knows the scale. A tensor of zeros stays as it is.
    """

    format: Format
    rule: CastRule
    path: tuple[FloatFormat, ...] = ()

    @property
    def rounds_scales(self) -> bool:
        return False

    def __call__(self, x: Tensor) -> Tensor:
        codes, scale = self.operands(x)
        return codes * scale

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        largest = float(x.abs().amax()) / self.format.max if x.numel() else 0.0
        return TensorCast(self.format, self.rule, largest or 1.0, self.path).operands(x)

    def unrounded(self) -> WholeCast:
        return self


@dataclass(frozen=True, slots=True)
class ShiftedCast:
    """Integers with a zero point, as vLLM's int8 kernel has them: codes are x / scale, rounded, plus the zero point.

    scale None: both are found for each token, so that its smallest and largest element become the ends of the format.
    No scale is below 2^-20 of the token's largest magnitude, for tokens of nearly equal elements, nor below 2^-126.
    The values are (code - zero point) * scale. A token with a NaN or an infinity is NaN throughout.
    """

    format: IntFormat
    rule: CastRule
    scale: float | None = None
    zero_point: int = 0

    @property
    def rounds_scales(self) -> bool:
        return False

    def __call__(self, x: Tensor) -> Tensor:
        steps, scale = self.operands(x)
        return steps * scale

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes less their zero points, which a kernel takes off the sums, and the scales."""
        check_float32(x, "x")
        low, high = self.format.minimum, self.format.maximum
        if self.scale is None:
            least, most = torch.aminmax(x, dim=-1, keepdim=True) if x.numel() else (x[..., :1], x[..., :1])
            steps = torch.tensor(float(high - low), device=x.device)
            size = torch.maximum(most.abs(), least.abs())
            scale = torch.maximum((most - least) / steps, size * 2.0**-20).clamp(min=2.0**-126)
            zero = torch.round(low - least / scale)
        else:
            scale = torch.full((1,), self.scale, dtype=torch.float32, device=x.device)
            zero = torch.full((1,), float(self.zero_point), device=x.device)
        whole = quantize_values((x * (torch.ones_like(scale) / scale)).contiguous(), _WHOLE, self.rule)
        values = (whole + zero).clamp(low, high) - zero
        usable = (least.isfinite() & most.isfinite()) if self.scale is None else torch.ones_like(scale) > 0
        return torch.where(usable, values, torch.nan), scale

    def unrounded(self) -> ShiftedCast:
        return self


@dataclass(frozen=True, slots=True)
class NvFp4Cast:
    """NVFP4: a dynamic scale of `scale_format` for `group_size` features, under a second scale that multiplies.

    global_scale None: each token has its own second scale, so that its largest block has the largest scale, 448.
    """

    format: Format
    rule: CastRule
    global_scale: float | None
    scale_format: FloatFormat = E4M3FN
    group_size: int = 16

    def __post_init__(self) -> None:
        if self.global_scale is not None and not 0 < self.global_scale < float("inf"):
            raise ValueError(f"the second scale must be positive and finite, found {self.global_scale}")

    @property
    def rounds_scales(self) -> bool:
        return self.scale_format != FP32

    def __call__(self, x: Tensor) -> Tensor:
        values, outer = self.operands(x)
        return values * outer

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes times the scales of their groups, which the unit applies, and the second scale."""
        flat = x.reshape(-1, x.shape[-1])
        if self.global_scale is None:
            largest = flat.abs().amax(dim=1) if flat.shape[1] else flat.new_zeros(flat.shape[0])
            usable = largest.isfinite() & (largest >= _NVFP4_RANGE * 2.0**-126)
            outer = torch.where(usable, largest / torch.tensor(_NVFP4_RANGE, device=x.device), 1.0)
        else:
            outer = torch.full((flat.shape[0],), self.global_scale, dtype=torch.float32, device=x.device)
        # A block's scale may be as small as zero; the block is then zero.
        search = ScaleSearch(self.format.max, 0.0, False, self.group_size, self.scale_format)
        values, _ = quantize_scaled(flat, self.format, self.rule, search, outer)
        return values.view(x.shape), outer.view(*x.shape[:-1], 1)

    def unrounded(self) -> NvFp4Cast:
        return replace(self, scale_format=FP32)
