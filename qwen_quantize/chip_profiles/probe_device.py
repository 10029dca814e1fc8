"""What a probe asks of a device: products of matrices and casts, through calls that any device answers.

Operand and output types go by the names of number formats; `tf32` means float32 operands that the unit may round,
and `e4m3fn+fast` the product with the fast accumulation that some libraries offer. All values travel as float32 on
the host, where the formats hold them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from qwen_quantize.formats.dot_units import TF32
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.tables import FORMATS


class Unavailable(Exception):
    """The device does not do this; the message says why, for people."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One product that a device offers: both operands of the type `operands`, the result of type `output`."""

    operands: str
    output: str

    @property
    def name(self) -> str:
        """`fp16*fp16->fp32`."""
        return f"{self.operands}*{self.operands}->{self.output}"


class ProbedDevice(Protocol):
    """A device under test."""

    @property
    def name(self) -> str:
        """As `--on` takes it."""
        ...

    def pairs(self) -> tuple[Pair, ...]:
        """The products worth trying, the wider output of each operand type first."""
        ...

    def casts(self) -> tuple[str, ...]:
        """The types worth casting float32 to."""
        ...

    def matmul(self, a: Tensor, b: Tensor, pair: Pair) -> Tensor:
        """a [M, K] times b [N, K] transposed; float32 holding operand values in and output values out.

        An int32 result is int32. Unavailable where the device does not compute it, or the host did.
        """
        ...

    def cast(self, x: Tensor, target: str) -> Tensor:
        """Codes of float32 x, dtype `formats.codec.code_dtype`; Unavailable as for `matmul`."""
        ...

    def about(self) -> Mapping[str, str]:
        """Versions of everything that may change the bits, as far as it can be read."""
        ...


def operand_format(name: str) -> Format:
    """The number format behind the operand type `name`."""
    plain = name.partition("+")[0]
    return TF32 if plain == "tf32" else FORMATS[plain]
