"""Matrix units whose arithmetic is published, each with its source, and the plain float32 orders.

Nothing here is guessed: a chip that is missing has no published numbers. Where sources leave a case open that only
sums below 2^-126 can meet, the comment says so. Block-scaled instructions (MXFP8, MXFP4, NVFP4 with their scales
inside the unit) are another operation and not covered.
"""

from __future__ import annotations

from dataclasses import replace

from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.formats.dot_record import DotUnit, Joining, Order, Register, TwoStage
from qwen_quantize.formats.spec import FloatFormat
from qwen_quantize.formats.tables import BF16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FP16, FP32

# The operands of TF32 and XF32 units, stored as float32 with 13 unused bits.
TF32 = FloatFormat("tf32", 8, 10, bias=127, has_infinity=True, nan_codes=(0x3FE00,))

_MMA_SIM = "MMA-Sim, arXiv 2511.10909"
_KHATTAK = "Khattak and Mikaitis, arXiv 2512.07004, with their MATLAB models"
_FASI = "Fasi, Higham, Mikaitis, Pranesh, PeerJ CS 7:e330"
_NVIDIA_NAN = 0x7FFFFFFF
_NVIDIA_NAN_FP16 = 0x7FFFE000  # fp16's 0x7FFF, widened


def _nvidia(
    name: str, operands: FloatFormat, products: int, fraction_bits: int, source: str, *,
    mantissa_bits: int = 23, floor: int | None = None,
) -> DotUnit:  # fmt: skip
    """Everything aligned with c, cut toward zero, and the sum cut toward zero to a float32."""
    return DotUnit(
        name,
        operands,
        operands,
        Order.ALIGNED,
        products=products,
        fraction_bits=fraction_bits,
        min_alignment_exponent=floor,
        mantissa_bits=mantissa_bits,
        final_rounding=Rounding.RTZ,
        input_rounding=Rounding.RTZ if operands is TF32 else None,
        nan_bits=_NVIDIA_NAN,
        source=source,
    )


def _half_register(unit: DotUnit) -> DotUnit:
    """The same unit with fp16 sums: rounded to nearest after every step."""
    return replace(
        unit,
        name=f"{unit.name}-fp16-sum",
        register=Register.FP16,
        mantissa_bits=10,
        final_rounding=Rounding.RNE,
        nan_bits=_NVIDIA_NAN_FP16,
    )


def _cdna3(name: str, operands: FloatFormat, products: int, *, lanes: int = 1) -> DotUnit:
    """Products cut at 24 bits and added; that sum and c floored at 31 and 24 bits below the larger.

    c = 0 has the exponent -126. Bytes are added in an even and an odd lane, which drop a far smaller c.
    """
    wide_range = operands.exponent_bits == 8
    return DotUnit(
        name,
        operands,
        operands,
        Order.ALIGNED,
        products=products,
        fraction_bits=24,
        products_overflow=wide_range,
        lanes=lanes,
        joining=Joining.TWO_STAGE,
        two_stage=TwoStage(31, 24, Rounding.FLOOR, dropped_below=25 if lanes == 2 else None),
        min_alignment_exponent=-126,
        input_rounding=Rounding.RTZ if operands is TF32 else None,
        source=_MMA_SIM,
    )


def _fp32(name: str, order: Order, source: str = "") -> DotUnit:
    return DotUnit(name, FP32, FP32, order, source=source)


# A sequential fused multiply-add, a pairwise tree over all of K, and any order at all.
FMA_FP32 = _fp32("fp32-fma", Order.FMA)
PAIRWISE_FP32 = _fp32("fp32-pairwise", Order.PAIRWISE)
PLAIN_FP32 = _fp32("fp32-plain", Order.UNSPECIFIED)

_V100 = _nvidia("v100-fp16", FP16, 4, 23, f"{_FASI}; {_KHATTAK}; {_MMA_SIM}")
# MMA-Sim's step has 8 products; Fasi et al. reported 4 for the same chip.
_T4 = _nvidia("t4-fp16", FP16, 8, 24, _MMA_SIM)
# Sources put a floor of about -132 under the alignment exponent of Ampere and Ada, without a number for each:
# left out; bf16 and tf32 sums below that are not covered.
_A100 = _nvidia("a100-fp16", FP16, 8, 24, f"{_KHATTAK} (A2 and A30 alike); {_MMA_SIM}")
_ADA_FP8 = _nvidia("ada-e4m3fn", E4M3FN, 16, 13, f"{_KHATTAK}; {_MMA_SIM}", mantissa_bits=13)
_HOPPER = _nvidia("hopper-fp16", FP16, 16, 25, f"{_KHATTAK}; {_MMA_SIM}", floor=-133)
_HOPPER_FP8 = _nvidia("hopper-e4m3fn", E4M3FN, 32, 13, f"{_KHATTAK}; {_MMA_SIM}", mantissa_bits=13)
_BLACKWELL = _nvidia("blackwell-fp16", FP16, 16, 25, f"{_KHATTAK}; {_MMA_SIM}", floor=-133)
_BLACKWELL_FP8 = _nvidia("blackwell-e4m3fn", E4M3FN, 32, 25, f"{_KHATTAK}; {_MMA_SIM}", floor=-133)
_MI100 = DotUnit("mi100-fp16", FP16, FP16, Order.ALIGNED, products=4, source=_MMA_SIM)
_MI250 = DotUnit(
    "mi250-fp16",
    FP16,
    FP16,
    Order.PAIRWISE,
    products=4,
    flush_inputs=True,
    flush_outputs=True,
    source=_MMA_SIM,
)


def _of(unit: DotUnit, name: str, operands: FloatFormat, products: int | None = None) -> DotUnit:
    """The unit with other operands."""
    rounding = Rounding.RTZ if operands is TF32 else None
    return replace(
        unit,
        name=name,
        a_format=operands,
        b_format=operands,
        products=products or unit.products,
        input_rounding=rounding,
    )


_ALL = (
    _V100,
    _half_register(_V100),
    _T4,
    _half_register(_T4),
    _A100,
    _half_register(_A100),
    _of(_A100, "a100-bf16", BF16),
    _of(_A100, "a100-tf32", TF32, 4),
    _of(_A100, "ada-fp16", FP16),
    _of(_A100, "ada-bf16", BF16),
    _of(_A100, "ada-tf32", TF32, 4),
    _ADA_FP8,
    _of(_ADA_FP8, "ada-e5m2", E5M2),
    _half_register(_ADA_FP8),
    _HOPPER,
    _half_register(_HOPPER),
    _of(_HOPPER, "hopper-bf16", BF16),
    _of(_HOPPER, "hopper-tf32", TF32, 8),
    _HOPPER_FP8,
    _of(_HOPPER_FP8, "hopper-e5m2", E5M2),
    _half_register(_HOPPER_FP8),
    # DeepSeek-V3 (arXiv 2412.19437): kernels add the unit's sum to a float32 register every 128 products.
    replace(_HOPPER_FP8, name="hopper-e4m3fn-promoted", promotion_interval=128, source="arXiv 2412.19437"),
    _BLACKWELL,
    _of(_BLACKWELL, "blackwell-bf16", BF16),
    _of(_BLACKWELL, "blackwell-tf32", TF32, 8),
    _BLACKWELL_FP8,
    _of(_BLACKWELL_FP8, "blackwell-e5m2", E5M2),
    _MI100,
    _of(_MI100, "mi100-bf16", BF16, 2),
    _MI250,
    _of(_MI250, "mi250-bf16", BF16, 2),
    _of(_MI250, "mi250-bf16-1k", BF16, 4),
    _cdna3("mi300-fp16", FP16, 8),
    _cdna3("mi300-bf16", BF16, 8),
    _cdna3("mi300-xf32", TF32, 4),
    _cdna3("mi300-e4m3fnuz", E4M3FNUZ, 16, lanes=2),
    _cdna3("mi300-e5m2fnuz", E5M2FNUZ, 16, lanes=2),
    _fp32("cdna-fp32", Order.FMA, _MMA_SIM),
)
PUBLISHED_UNITS: dict[str, DotUnit] = {unit.name: unit for unit in _ALL}
