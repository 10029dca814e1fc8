"""What becomes of the keys and values that a model remembers: the words of `--kv-cache`, and what one costs.

A scheme names how one value is stored (`KvElement`), how many of the newest tokens (`window`) and of the first
ones (`sinks`) stay in 16 bits, and, for mixed precision, how many bits a value may take in the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from qwen_quantize.errors import UserError
from qwen_quantize.formats.spec import Format, IntFormat
from qwen_quantize.formats.tables import BF16, E4M3FN, FP16, INT4, INT8

GROUP_SIZES = (32, 64, 128)
_GROUP = 128
LATENT_TILE = 128  # elements of a latent that share a scale, as FlashMLA stores them
KEPT_BITS = 16  # of a value in the window or among the sinks
STATIC_TOP = 1 << 20  # the most tokens that `window` or `sinks` may name
_FLOAT_SCALE_BITS = 32  # of a scale found for each token
_PAIR_BITS = 32  # of a scale and an offset in FP16
_WINDOW, _SINKS = 128, 4
_UNROTATED = "keys=pre-rope"
_GRADIENT = "importance=gradient"
_FEWEST_MIXED_BITS, _MOST_MIXED_BITS = 4.0, 16.0


class KvScaling(StrEnum):
    """Which values share a scale, and when it is found."""

    NONE = "none"
    TENSOR = "tensor"  # one for all keys (or values) of a layer, from calibration
    HEAD = "head"  # one for each head, from calibration
    CHANNEL = "channel"  # one for each channel, from calibration
    TOKEN = "token"  # one for `group` channels of a token, found when it is stored
    SPAN = "span"  # a scale and an offset for each channel over `group` tokens
    SLICE = "slice"  # a scale and an offset for `group` channels of a token

    @property
    def static(self) -> bool:
        return self in (KvScaling.TENSOR, KvScaling.HEAD, KvScaling.CHANNEL)


@dataclass(frozen=True, slots=True)
class KvElement:
    """How one value is stored. group: channels (TOKEN, SLICE) or tokens (SPAN) that share a scale, else 1."""

    format: Format
    scaling: KvScaling = KvScaling.NONE
    group: int = 1

    @property
    def tokens(self) -> int:
        """Tokens that can only be stored together."""
        return self.group if self.scaling is KvScaling.SPAN else 1

    def scales_per_token(self, channels: int) -> float:
        """How many scales (or pairs of scale and offset) one token's `channels` values take."""
        match self.scaling:
            case KvScaling.TOKEN | KvScaling.SLICE:
                return math.ceil(channels / self.group)
            case KvScaling.SPAN:
                return channels / self.group
        return 0.0

    def bits_per_token(self, channels: int) -> float:
        """Storage of one token's `channels` values, scales included; static scales are no token's."""
        each = _FLOAT_SCALE_BITS if self.scaling is KvScaling.TOKEN else _PAIR_BITS
        return self.format.bits * channels + each * self.scales_per_token(channels)

    def describe(self) -> str:
        match self.scaling:
            case KvScaling.NONE:
                return self.format.name
            case KvScaling.SPAN:
                return f"{self.format.name}, scale and offset per channel over {self.group} tokens"
            case KvScaling.SLICE:
                return f"{self.format.name}, scale and offset per token and {self.group} channels"
            case KvScaling.TOKEN:
                return f"{self.format.name}, a scale per token and {self.group} channels"
        return f"{self.format.name}, one fixed scale per {self.scaling}"


class KvKind(StrEnum):
    """The first word of `--kv-cache`."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    MIXED = "mixed"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class KvScheme:
    """A parsed `--kv-cache`. scaling: of FP8 and INT8; group: of INT4, and of mixed's keys, the most
    tokens that share a scale; bits: the budget of mixed.

    unrotated: keys are stored as they are before the rotary embedding, which turns them whenever they are read; their
    channels then have the same range at all positions. gradient: mixed weighs errors by the gradient of the model's
    predictions, and not by what they do to the layer's own output.
    """

    kind: KvKind
    scaling: KvScaling = KvScaling.NONE
    group: int = _GROUP
    bits: float | None = None
    window: int = 0
    sinks: int = 0
    unrotated: bool = False
    gradient: bool = False

    @property
    def name(self) -> str:
        """The scheme in the words that `parse_kv_scheme` reads."""
        text = self.kind.value
        match self.kind:
            case KvKind.FP8:
                text += "" if self.scaling is KvScaling.TENSOR else f":{self.scaling}"
            case KvKind.INT8:
                text += "" if self.scaling is KvScaling.CHANNEL else f":{self.scaling}"
            case KvKind.INT4:
                text += f":{self.group}"
            case KvKind.MIXED:
                text += f":{self.bits:g}" + ("" if self.group == _GROUP else f":{self.group}")
        if self.kind in (KvKind.FP16, KvKind.BF16, KvKind.AUTO):
            return text
        text += f",{_UNROTATED}" if self.unrotated else ""
        text += f",{_GRADIENT}" if self.gradient else ""
        return f"{text},window={self.window},sinks={self.sinks}"

    @property
    def needs_scales(self) -> bool:
        """Whether calibration has to find scales before anything is stored."""
        return self.scaling.static

    def key_element(self, head_dim: int) -> KvElement:
        """How keys of one head are stored; for mixed precision, at its lowest width."""
        if self.kind in (KvKind.INT4, KvKind.MIXED):
            return KvElement(INT4, KvScaling.SPAN, self.group)
        return self._element(head_dim)

    def value_element(self, head_dim: int) -> KvElement:
        """How values of one head are stored; for mixed precision, at its lowest width."""
        if self.kind is KvKind.MIXED:
            return KvElement(INT4, KvScaling.SLICE, min(_GROUP, head_dim))
        if self.kind is KvKind.INT4:
            return KvElement(INT4, KvScaling.SLICE, min(self.group, head_dim))
        return self._element(head_dim)

    def latent_element(self, rank: int) -> KvElement:
        """How the latent of multi-head latent attention is stored; what carries the position stays bf16.

        For mixed precision, at its lowest width.
        """
        tile = min(LATENT_TILE, rank)
        match self.kind:
            case KvKind.FP8:
                return KvElement(E4M3FN, KvScaling.TOKEN, tile)
            case KvKind.INT8:
                return KvElement(INT8, KvScaling.TOKEN, tile)
            case KvKind.INT4:
                return KvElement(INT4, KvScaling.SLICE, min(self.group, rank))
            case KvKind.MIXED:
                return KvElement(INT4, KvScaling.SLICE, min(_GROUP, rank))
        return self._element(rank)

    def _element(self, head_dim: int) -> KvElement:
        match self.kind:
            case KvKind.FP16:
                return KvElement(FP16)
            case KvKind.BF16:
                return KvElement(BF16)
            case KvKind.FP8:
                return _with_scaling(E4M3FN, self.scaling, head_dim)
            case KvKind.INT8:
                return _with_scaling(INT8, self.scaling, head_dim)
        raise ValueError(f"--kv-cache {self.kind} has no element of its own: it is decided for each model")


def _with_scaling(fmt: Format, scaling: KvScaling, head_dim: int) -> KvElement:
    return KvElement(fmt, scaling, head_dim if scaling is KvScaling.TOKEN else 1)


def parse_kv_scheme(text: str) -> KvScheme:
    """`KIND[:ARGUMENT][,window=N][,sinks=N]`; UserError says what may stand there.

    Arguments: fp8 `tensor`, `head` or `token`; int8 `channel` or `token`; int4 the group, 32, 64 or 128; mixed
    the bits of a value in the mean, 5.07 where none are given, and after another colon the most
    tokens whose keys share a scale.
    """
    head, *options = (part.strip() for part in text.strip().lower().split(","))
    word, sign, argument = head.partition(":")
    if word not in tuple(KvKind):
        raise UserError(f"--kv-cache {text!r} is not one of the schemes: {', '.join(KvKind)}")
    kind = KvKind(word)
    scheme = KvScheme(kind)
    match kind:
        case KvKind.FP8:
            scheme = replace(scheme, scaling=_scaling(text, argument, sign, ("tensor", "head", "token")))
        case KvKind.INT8:
            scheme = replace(scheme, scaling=_scaling(text, argument, sign, ("channel", "token")))
        case KvKind.INT4:
            group = _group(text, argument) if sign else _GROUP
            scheme = replace(scheme, group=group, window=_WINDOW, sinks=_SINKS)
        case KvKind.MIXED:
            budget, second, size = argument.partition(":")
            scheme = replace(scheme, bits=_bits(text, budget) if sign else 5.07, window=_WINDOW, sinks=_SINKS)
            if second:
                scheme = replace(scheme, group=_group(text, size))
        case _:
            if sign:
                raise UserError(f"--kv-cache {text!r}: {kind} takes no argument")
    for option in options:
        if option == _UNROTATED and kind in (KvKind.INT4, KvKind.MIXED):
            scheme = replace(scheme, unrotated=True)
            continue
        if option == _GRADIENT and kind is KvKind.MIXED:
            scheme = replace(scheme, gradient=True)
            continue
        key, _, value = option.partition("=")
        if key not in ("window", "sinks") or kind in (KvKind.FP16, KvKind.BF16, KvKind.AUTO):
            raise UserError(
                f"--kv-cache {text!r}: {option!r} says nothing here; window=N and sinks=N may follow fp8, int8, int4 "
                f"and mixed, {_UNROTATED} int4 and mixed, {_GRADIENT} mixed"
            )
        number = _whole(text, key, value)
        scheme = replace(scheme, window=number) if key == "window" else replace(scheme, sinks=number)
    return scheme


def _scaling(text: str, argument: str, sign: str, allowed: tuple[str, ...]) -> KvScaling:
    if not sign:
        return KvScaling(allowed[0])
    if argument not in allowed:
        raise UserError(f"--kv-cache {text!r}: scales are for each {_listed(allowed)}")
    return KvScaling(argument)


def _whole(text: str, what: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 7 or int(value) > STATIC_TOP:
        raise UserError(f"--kv-cache {text!r}: {what} must be a whole number up to {STATIC_TOP}")
    return int(value)


def _group(text: str, argument: str) -> int:
    group = _whole(text, "group", argument)
    if group not in GROUP_SIZES:
        raise UserError(f"--kv-cache {text!r}: groups have {_listed(GROUP_SIZES)} elements")
    return group


def _bits(text: str, value: str) -> float:
    try:
        bits = float(value)
    except ValueError:
        bits = math.nan
    if not _FEWEST_MIXED_BITS < bits <= _MOST_MIXED_BITS:
        raise UserError(
            f"--kv-cache {text!r}: the bits of a value, scales included, lie above 4 and up to 16: INT4 is the "
            "narrowest that is mixed in"
        )
    return bits


def _listed(words: tuple[object, ...]) -> str:
    *most, last = map(str, words)
    return f"{', '.join(most)} or {last}"


def mixed_bits(shares: tuple[tuple[float, KvElement, int], ...]) -> float:
    """Bits of a value in the mean of (share of the channels, element, channels of a token that are so stored)."""
    return sum(share * element.bits_per_token(channels) / channels for share, element, channels in shares)


def effective_bits(bits: float, tokens: int, kept: int) -> float:
    """Bits of a value in a context of `tokens`, `kept` of which stay in 16 bits."""
    kept = min(kept, tokens)
    return (KEPT_BITS * kept + bits * (tokens - kept)) / tokens


def widened(element: KvElement, fmt: Format) -> KvElement:
    """An element of another width in the place of `element`: integers keep its groups, FP16 needs no scales."""
    return replace(element, format=fmt) if isinstance(fmt, IntFormat) else KvElement(fmt)
