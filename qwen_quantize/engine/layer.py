"""What one decoder layer computes with, and the two small functions that every half of it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from qwen_quantize.engine.linear import LinearGroup
from qwen_quantize.models.blueprint import Stream

# From a routed expert's number to its linears, under EXPERT_INPUT and EXPERT_HIDDEN. A call may read them from
# disk: whoever calls asks for each expert once, and drops it before the next.
Experts = Callable[[int], Mapping[Stream, LinearGroup]]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer, or half of one.

    groups: its linears by stream, without routed experts; tensors: whatever else it holds, float32 by suffix
    (norms, router, gates); experts: None for a dense MLP.
    """

    groups: Mapping[Stream, LinearGroup]
    tensors: Mapping[str, Tensor]
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class ResidentExperts:
    """Experts that stay in memory."""

    members: tuple[Mapping[Stream, LinearGroup], ...]

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for member in self.members for group in member.values())

    def __call__(self, expert: int) -> Mapping[Stream, LinearGroup]:
        return self.members[expert]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def activate(x: Tensor, name: str) -> Tensor:
    """The MLP's activation function that a config names."""
    match name:
        case "silu":
            return functional.silu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_pytorch_tanh":
            return functional.gelu(x, approximate="tanh")
    raise ValueError(f"activation {name!r} is not one that a config may name")
