"""The named schemes: what becomes of a linear layer's weight and of the activations that enter it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qwen_quantize.formats.granularity import Granularity, GranularityKind
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.spec import Format, IntFormat
from qwen_quantize.formats.tables import E2M1, E2M3, E4M3FN, E8M0, FP16, FP32, HIF8, INT4, INT8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor's element format, the region that shares a scale, the scale's format and how it is chosen.

    `scale_rule` is for E8M0 scales and None for scales with a mantissa. `tensor_scale_format` is that of a
    second-level scale for the whole tensor (NVFP4). `symmetric` False: integers with a zero point.
    """

    format: Format
    granularity: Granularity
    scale_format: Format
    scale_rule: ScaleRule | None = None
    tensor_scale_format: Format | None = None
    symmetric: bool = True


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a linear layer becomes.

    `activation` None: activations stay; `dynamic`: their scales are found at run time.
    """

    name: str
    weight: TensorSpec
    activation: TensorSpec | None
    dynamic: bool
    description: str

    def with_group(self, size: int | None) -> Scheme:
        """The same scheme with one weight scale for `size` elements of a row, None for the whole row.

        ValueError unless the scheme's weights are integers: the groups of the other formats are part of them.
        """
        if not isinstance(self.weight.format, IntFormat):
            raise ValueError(f"the weight scales of scheme {self.name} have no group size to choose")
        shape = Granularity.channel() if size is None else Granularity.group(size)
        return replace(self, weight=replace(self.weight, granularity=shape))

    def with_zero_point(self) -> Scheme:
        """The same scheme with a zero point beside each weight scale; ValueError unless weights are integers."""
        if not isinstance(self.weight.format, IntFormat):
            raise ValueError(
                f"the {self.weight.format.name} weights of scheme {self.name} have no zero point"
            )
        return replace(self, weight=replace(self.weight, symmetric=False))

    def with_block(self, rows: int, cols: int) -> Scheme:
        """The same scheme with weight tiles of `rows` x `cols` and activation groups of `cols`.

        ValueError unless the scheme's weight has group or block scales and its activations, if any, have
        groups.
        """
        tiled = (GranularityKind.GROUP, GranularityKind.BLOCK)
        if self.weight.granularity.kind not in tiled:
            raise ValueError(
                f"scheme {self.name} has one weight scale for each {self.weight.granularity.kind}: "
                "no block size applies"
            )
        shape = Granularity.group(cols) if rows == 1 else Granularity.block(rows, cols)
        activation = self.activation
        if activation is not None and activation.granularity.kind is GranularityKind.GROUP:
            activation = replace(activation, granularity=Granularity.group(cols))
        return replace(self, weight=replace(self.weight, granularity=shape), activation=activation)


def _e8m0(fmt: Format, granularity: Granularity, rule: ScaleRule) -> TensorSpec:
    return TensorSpec(fmt, granularity, E8M0, rule)


def _fp32(fmt: Format, granularity: Granularity) -> TensorSpec:
    return TensorSpec(fmt, granularity, FP32)


_NVFP4 = TensorSpec(E2M1, Granularity.group(16), E4M3FN, tensor_scale_format=FP32)

# The E8M0 rules follow the policy for round-to-nearest saturating casts: never clip FP8, clip FP4 and FP6 a
# little. A chip profile with another cast may replace them.
SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            "ue8m0",
            _e8m0(E4M3FN, Granularity.block(128, 128), ScaleRule.SEARCH),
            _e8m0(E4M3FN, Granularity.group(128), ScaleRule.RCEIL),
            dynamic=True,
            description="FP8 E4M3, power-of-two scales: 128x128 weight blocks, activation groups of 128",
        ),
        Scheme(
            "mxfp8",
            _e8m0(E4M3FN, Granularity.group(32), ScaleRule.SEARCH),
            _e8m0(E4M3FN, Granularity.group(32), ScaleRule.RCEIL),
            dynamic=True,
            description="OCP MXFP8: E4M3 with a power-of-two scale for 32 weights or activations",
        ),
        Scheme(
            "mxfp6",
            _e8m0(E2M3, Granularity.group(32), ScaleRule.SEARCH),
            _e8m0(E2M3, Granularity.group(32), ScaleRule.EVEN),
            dynamic=True,
            description="OCP MXFP6: E2M3 with a power-of-two scale for 32 weights or activations",
        ),
        Scheme(
            "mxfp4",
            _e8m0(E2M1, Granularity.group(32), ScaleRule.SEARCH),
            _e8m0(E2M1, Granularity.group(32), ScaleRule.EVEN),
            dynamic=True,
            description="OCP MXFP4: E2M1 with a power-of-two scale for 32 weights or activations",
        ),
        Scheme(
            "nvfp4",
            _NVFP4,
            _NVFP4,
            dynamic=True,
            description="NVFP4: E2M1 with an E4M3 scale for 16 elements and an FP32 scale for the tensor",
        ),
        Scheme(
            "fp8",
            _fp32(E4M3FN, Granularity.channel()),
            _fp32(E4M3FN, Granularity.token()),
            dynamic=True,
            description="FP8 E4M3 with FP32 scales for each output channel and each token",
        ),
        Scheme(
            "w8a8",
            _fp32(INT8, Granularity.channel()),
            _fp32(INT8, Granularity.token()),
            dynamic=True,
            description="INT8 weights and activations, FP32 scales per output channel and per token",
        ),
        Scheme(
            "w4a16",
            TensorSpec(INT4, Granularity.group(128), FP16),
            None,
            dynamic=False,
            description="INT4 weights with an FP16 scale for 128 elements; activations stay in 16 bits",
        ),
        Scheme(
            "w8a16",
            TensorSpec(INT8, Granularity.group(128), FP16),
            None,
            dynamic=False,
            description="INT8 weights with an FP16 scale for 128 elements; activations stay in 16 bits",
        ),
        Scheme(
            "w4a8",
            _fp32(INT4, Granularity.group(128)),
            _fp32(INT8, Granularity.token()),
            dynamic=True,
            description="INT4 weights, an FP32 scale for 128 elements; INT8 activations, a scale per token",
        ),
        Scheme(
            "hif8",
            _fp32(HIF8, Granularity.channel()),
            _fp32(HIF8, Granularity.token()),
            dynamic=True,
            description="HiFloat8 with FP32 scales that centre each output channel and each token",
        ),
    )
}
