"""Which bits an arithmetic gives for fixed inputs, as hashes: from a profile emulated, from a device observed.

A checkpoint keeps those of the arithmetic that it was made for, a fingerprint those of the device that was probed.
Where the parameters of two sides agree and these hashes do not, something has changed that no parameter names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import qwen_quantize
from qwen_quantize.chip_profiles.arithmetic import Arithmetic
from qwen_quantize.chip_profiles.behaviour_vectors import CORPUS, cast_inputs, dot_operands
from qwen_quantize.chip_profiles.difference import Change
from qwen_quantize.chip_profiles.dot_unit import dot_unit_of
from qwen_quantize.chip_profiles.probe_device import Pair, ProbedDevice, Unavailable, operand_format
from qwen_quantize.chip_profiles.probe_emulated import STEP_RULE
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_path import CastStep, encode_along
from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.formats.codec import decode
from qwen_quantize.formats.dot import emulated_integer_matmul, emulated_matmul
from qwen_quantize.formats.dot_record import DotUnit, Order, Register, SumOverflow
from qwen_quantize.formats.kernel_calls import native_library
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat, TableFormat
from qwen_quantize.formats.tables import FORMATS

OUTPUTS = "outputs."  # begins the field of a change that only the hashes show
_RANDOM = (Rounding.STOCHASTIC, Rounding.HYBRID)
_WIDEST = 16  # bits of a format whose casts are tried
_ALL_BUT_NAN = ("values", "ties", "near_ties", "subnormals", "overflow", "corpus")
# Which groups of a cast's outputs a change of a field accounts for.
_ACCOUNTS_FOR = {
    "cast.rounding": _ALL_BUT_NAN,
    "cast.path": (*_ALL_BUT_NAN, "nan"),
    "cast.subnormals": tuple(name for name in _ALL_BUT_NAN if name != "overflow"),
    "cast.overflow": ("overflow", "nan"),
    "cast.nan": ("nan",),
}
_LONGEST = 300  # characters of a name, a hash or a version

Hashes = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """hashes: SHA-256 (hex) of outputs by cast (`fp32->e4m3fn`) or product (`e4m3fn*e4m3fn->fp32`), then by group.

    corpus: which inputs; only equal ones compare. versions: of what emulated them, none for a device.
    """

    hashes: Hashes
    versions: Mapping[str, str] = field(default_factory=dict)
    corpus: str = CORPUS

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the outputs, not over versions."""
        document = {"corpus": self.corpus, "hashes": self.hashes}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """As a manifest or a fingerprint holds it."""
        return {
            "corpus": self.corpus,
            "digest": self.digest,
            "hashes": {name: dict(groups) for name, groups in self.hashes.items()},
            "versions": dict(self.versions),
        }


def behaviour_of(arithmetic: Arithmetic, scheme: Scheme, versions: Mapping[str, str]) -> Behaviour:
    """What the emulated unit gives for the casts and products of `scheme`; the same with any number of threads.

    Left out: casts that round at random, and products whose unit is not stated. versions: of the profile.
    """
    hashes: dict[str, Mapping[str, str]] = {}
    if scheme.activation is not None:
        activation, weight = scheme.activation.format, scheme.weight.format
        if arithmetic.activation_cast.rounding not in _RANDOM and activation.bits <= _WIDEST:
            steps = (
                *(CastStep(FORMATS[name], STEP_RULE) for name in arithmetic.activation_path),
                CastStep(activation, arithmetic.activation_cast),
            )
            hashes[f"fp32->{activation.name}"] = _cast_hashes(activation, lambda x: encode_along(x, steps))
        unit = None if weight != activation else _unit(arithmetic, activation)
        if unit is not None:
            integer = unit.register is Register.INT32
            name = Pair(activation.name, "int32" if integer else "fp32").name
            multiply = emulated_integer_matmul if integer else emulated_matmul
            hashes[name] = _dot_hashes(unit.a_format, lambda a, b: multiply(a, b, unit))
    return Behaviour(hashes, {**program_versions(), **versions})


def device_behaviour(device: ProbedDevice, pairs: Iterable[Pair], casts: Iterable[str]) -> Behaviour:
    """What `device` gives for the same inputs; left out is what it does not do, or not twice alike."""
    hashes: dict[str, Mapping[str, str]] = {}
    for target in casts:
        if FORMATS[target].bits <= _WIDEST:
            with suppress(Unavailable):
                cast = partial(device.cast, target=target)
                found = _cast_hashes(FORMATS[target], cast)
                if found == _cast_hashes(FORMATS[target], cast):
                    hashes[f"fp32->{target}"] = found
    for pair in pairs:
        operands = operand_format(pair.operands)
        if isinstance(operands, FloatFormat | IntFormat):
            with suppress(Unavailable):
                multiply = partial(device.matmul, pair=pair)
                found = _dot_hashes(operands, multiply)
                if found == _dot_hashes(operands, multiply):
                    hashes[pair.name] = found
    return Behaviour(hashes)


def program_versions() -> dict[str, str]:
    """What computes an emulated unit here. Kernels: `compiled`, or their torch twin."""
    return {
        "qwen_quantize": qwen_quantize.__version__,
        "torch": str(torch.__version__),
        "kernels": "twin" if native_library() is None else "compiled",
    }


def read_behaviour(raw: object, where: str) -> Behaviour | None:
    """The inverse of `Behaviour.record`, None for None; UserError where it is none or was changed since."""
    if raw is None:
        return None
    record = raw if isinstance(raw, dict) else {}
    hashes, versions, corpus = (record.get(key) for key in ("hashes", "versions", "corpus"))
    if not (
        isinstance(corpus, str)
        and _texts(versions)
        and isinstance(hashes, dict)
        and all(_texts(groups) for groups in hashes.values())
    ):
        raise UserError(f"{where}: the behaviour is not one that this program wrote, found {raw!r:.80}")
    found = Behaviour(hashes, versions if isinstance(versions, dict) else {}, corpus)
    if found.digest != record.get("digest"):
        raise UserError(f"{where}: the digest of the behaviour does not fit its hashes: the file was changed")
    return found


def differing(before: Behaviour, after: Behaviour) -> dict[str, tuple[str, ...]]:
    """The groups whose outputs differ, by cast or product, of what both sides have over the same inputs."""
    if before.corpus != after.corpus:
        return {}
    found = {}
    for name in sorted(before.hashes.keys() & after.hashes.keys()):
        ours, theirs = before.hashes[name], after.hashes[name]
        groups = tuple(group for group in ours if group in theirs and ours[group] != theirs[group])
        if groups:
            found[name] = groups
    return found


def unnamed_changes(
    before: Behaviour, after: Behaviour, changed: Iterable[Change], target: str
) -> tuple[Change, ...]:
    """Outputs that differ without any of `changed` to account for it, of what `target` activations meet.

    target: the format that activations are cast to, whose arithmetic the fields of `changed` are.
    """
    fields = [change.field for change in changed]
    accounted = {group for name in fields for group in _ACCOUNTS_FOR.get(name, ())}
    sums = any(name.startswith("accumulator.") for name in fields)
    found = []
    for name, groups in differing(before, after).items():
        is_cast = name == f"fp32->{target}"
        if not is_cast and (sums or not name.startswith(f"{target}*{target}->")):
            continue
        left = tuple(group for group in groups if not is_cast or group not in accounted)
        if left:
            kind = "cast" if is_cast else "product"
            words = f"{kind} {_short(name)}: its outputs differ ({', '.join(left)}), and no field says why"
            ours, theirs = (_short_hash(side.hashes[name]) for side in (before, after))
            found.append(Change(f"{OUTPUTS}{name}", ours, theirs, words))
    return tuple(found)


def version_changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """`torch: 2.6 -> 2.7` for every version that both sides state and that differs."""
    return tuple(
        f"{name}: {before[name]} -> {after[name]}"
        for name in before
        if name in after and before[name] != after[name]
    )


def _texts(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(text, str) and text.isprintable() and len(text) <= _LONGEST
        for pair in value.items()
        for text in pair
    )


def _unit(arithmetic: Arithmetic, operands: Format) -> DotUnit | None:
    """The unit whose width and step are stated, or that the engine computes with; None where neither is."""
    accumulator = arithmetic.accumulator
    if isinstance(operands, IntFormat):
        if accumulator.format != "int32":
            return None
        register, overflow = Register.INT32, SumOverflow.WRAP  # the corpus never overflows
        return DotUnit(operands.name, operands, operands, Order.ALIGNED, register=register, overflow=overflow)
    # Whether an fp16 register overflows depends on how a kernel scales its codes.
    stated = accumulator.fraction_bits is not None and accumulator.products_per_step is not None
    if isinstance(operands, TableFormat) or accumulator.format != "fp32" or not stated:
        return None
    return dot_unit_of(arithmetic, operands, operands, bit_true=True)


def _cast_hashes(fmt: Format, cast: Callable[[Tensor], Tensor]) -> dict[str, str]:
    """By group, of the codes; every NaN counts as the same one."""
    found = {}
    for name, inputs in cast_inputs(fmt).items():
        codes = cast(inputs)
        found[name] = _hash(torch.where(decode(codes, fmt).isnan(), -1, codes.to(torch.int32)))
    return found


def _dot_hashes(fmt: FloatFormat | IntFormat, multiply: Callable[[Tensor, Tensor], Tensor]) -> dict[str, str]:
    found = {}
    for name, (a, b) in dot_operands(fmt).items():
        out = multiply(a, b)
        found[name] = _hash(torch.where(out.isnan(), torch.nan, out) if out.is_floating_point() else out)
    return found


def _hash(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.int32).numpy().astype("<i4").tobytes()).hexdigest()


def _short_hash(groups: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(groups), sort_keys=True).encode()).hexdigest()[:12]


def _short(name: str) -> str:
    """`e4m3` for e4m3fn, as changes of fields say it."""
    return re.sub(r"e4m3fn(?!uz)", "e4m3", name)
