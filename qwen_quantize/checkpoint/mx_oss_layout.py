"""The layout of gpt-oss, written: routed experts as MXFP4 in tensors of a whole layer, everything else in 16 bits.

A linear is planned, packed and read under names of its own, as compressed-tensors has them; `stack_experts` says where
in the files they stand (`mx_oss` describes the bytes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qwen_quantize.checkpoint.compressed_tensors import COMPRESSED_TENSORS
from qwen_quantize.checkpoint.layout_parts import UsualFolder
from qwen_quantize.checkpoint.mx_oss import BLOCK_BYTES, GROUP, mx_oss_config
from qwen_quantize.checkpoint.shards import OutputTensor
from qwen_quantize.checkpoint.stacked_output import StackedPart
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.formats.tables import E2M1, E8M0

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")
# The linear, where its rows begin and how far apart they are in the tensor of all experts.
_PLACES = {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    "down_proj": ("down_proj", 0, 1),
}
_SUFFIXES = {"weight_packed": "blocks", "weight_scale": "scales"}


@dataclass(frozen=True, slots=True)
class MxOssLayout(UsualFolder):
    """See the module."""

    name: str
    readers: tuple[str, ...]

    def holds(self, module: str) -> bool:
        """Whether the layout has a place for a quantized linear of this name: routed experts alone."""
        return _EXPERT.fullmatch(module) is not None

    def outputs(self, module: str, shape: tuple[int, int], scheme: Scheme) -> tuple[OutputTensor, ...]:
        """The tensors of an expert's linear [N, K], its weight first; UserError where the layout cannot hold it."""
        self._check(module, scheme)
        if shape[1] % GROUP:
            raise UserError(
                f"{module!r} has {shape[1]} input features, no multiple of {GROUP}, and layout {self.name} has no "
                "partial blocks; choose another --layout"
            )
        return COMPRESSED_TENSORS.outputs(module, shape, scheme)

    def pack(
        self, module: str, quantized: QuantizedTensor, scheme: Scheme, input_amax: float | None = None
    ) -> dict[str, Tensor]:
        """The tensors that `outputs` names; ValueError where `quantized` is not what the scheme says."""
        self.outputs(module, (quantized.shape[0], quantized.shape[1]), scheme)
        return COMPRESSED_TENSORS.pack(module, quantized, scheme, input_amax)

    def unpack(
        self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme
    ) -> QuantizedTensor:
        """The inverse of `pack`; UserError where a tensor is missing or does not fit."""
        self.outputs(module, shape, scheme)
        return COMPRESSED_TENSORS.unpack(module, tensors, shape, scheme)

    def quantization_config(self, schemes: Mapping[str, Scheme], kept: Sequence[str]) -> dict[str, Any]:
        if not schemes:
            raise UserError(
                f"no linear is quantized, so there is nothing to say in the config of layout {self.name}"
            )
        for module, scheme in schemes.items():
            self._check(module, scheme)
        return mx_oss_config(list(kept))

    def notes(self, schemes: Mapping[str, Scheme]) -> tuple[str, ...]:  # noqa: ARG002
        return (
            f"layout {self.name} is that of gpt-oss: vLLM, SGLang and transformers read it for gpt-oss alone, and "
            "this model in it is read by this program's engine alone; to serve it elsewhere take --layout "
            "compressed-tensors",
        )

    def _check(self, module: str, scheme: Scheme) -> None:
        if not self.holds(module):
            raise UserError(
                f"layout {self.name} holds routed experts with gate_proj, up_proj and down_proj alone, not {module!r}; "
                "leave it in 16 bits, or choose another --layout"
            )
        weight = scheme.weight
        grid = (weight.format, weight.granularity, weight.scale_format)
        if grid != (E2M1, Granularity.group(GROUP), E8M0) or scheme.activation is not None:
            inputs = "" if scheme.activation is None else f" and {scheme.activation.format.name} inputs"
            raise UserError(
                f"layout {self.name} holds MXFP4 and leaves inputs as they are; scheme {scheme.name} has "
                f"{weight.format.name} with {weight.scale_format.name} scales {weight.granularity.describe()}{inputs}; "
                "take mxfp4, or another --layout"
            )


MX_OSS = MxOssLayout(
    name="mx-oss", readers=("vLLM for gpt-oss", "SGLang for gpt-oss", "transformers for gpt-oss")
)


def stack_of(module: str) -> str | None:
    """The stack, without `_blocks`, that a quantized expert's linear stands in; None for any other module."""
    found = _EXPERT.fullmatch(module)
    return None if found is None else f"{found[1]}.{_PLACES[found[3]][0]}"


def stack_experts(
    outputs: Sequence[OutputTensor],
) -> tuple[tuple[OutputTensor, ...], dict[str, StackedPart]]:
    """(the tensors of the files, where in them each expert's stand); each stack is in the place of its first part.

    UserError where an expert of a layer is missing or has another shape than its siblings.
    """
    stacks: dict[str, dict[tuple[int, int], OutputTensor]] = {}
    order: dict[str, OutputTensor | None] = {}
    parts: dict[str, StackedPart] = {}
    for output in outputs:
        module, _, suffix = output.name.rpartition(".")
        found = _EXPERT.fullmatch(module)
        if found is None or suffix not in _SUFFIXES:
            order[output.name] = output
            continue
        linear, first, step = _PLACES[found[3]]
        stack, entry = f"{found[1]}.{linear}_{_SUFFIXES[suffix]}", int(found[2])
        order.setdefault(stack, None)
        stacks.setdefault(stack, {})[entry, first] = output
        parts[output.name] = StackedPart(output, stack, entry, first, step)
    return tuple(
        _stacked(name, stacks[name], parts) if output is None else output for name, output in order.items()
    ), parts


def _stacked(
    name: str, members: Mapping[tuple[int, int], OutputTensor], parts: Mapping[str, StackedPart]
) -> OutputTensor:
    step = parts[next(iter(members.values())).name].step
    count = max(entry for entry, _ in members) + 1
    shapes = {output.shape for output in members.values()}
    if len(members) != count * step or len(shapes) > 1:
        raise UserError(
            f"tensor {name!r} holds all {count} experts of a layer in one shape, and of {count * step} linears "
            f"{len(members)} are quantized, in {len(shapes)} shapes; quantize or keep all experts of a layer"
        )
    rows, columns = shapes.pop()
    blocks = name.endswith("_blocks")
    inner = (columns // BLOCK_BYTES, BLOCK_BYTES) if blocks else (columns,)
    return OutputTensor(name, "U8", (count, rows * step, *inner))
