"""The numbers that Ascend's int8 and int4 kernels read beside the codes, each with its inverse where it has one."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.checkpoint.ascend_description import KV_TYPE, KV_TYPE_KEYS
from qwen_quantize.formats.packing import pack_row_pairs, signed_nibbles, unpack_row_pairs

# Row-parallel linears: their columns are split over up to 16 devices, each of which adds its share.
SPLIT_SHARES = 16
_SPLIT = ("down_proj", "o_proj", "w2")
_INT32 = torch.iinfo(torch.int32)


def pack_scale_words(scale: Tensor) -> Tensor:
    """int64 with the bits of float32 scales in the lower half, sign-extended: `deq_scale` of FP16 models."""
    return scale.contiguous().view(torch.int32).to(torch.int64)


def unpack_scale_words(words: Tensor) -> Tensor:
    """The float32 scales of `pack_scale_words`; ValueError for words that hold more than 32 bits."""
    if words.numel() and not (_INT32.min <= int(words.min()) and int(words.max()) <= _INT32.max):
        raise ValueError("the words hold more than the 32 bits of a scale")
    return words.to(torch.int32).view(torch.float32)


def pack_int4_pairs(codes: Tensor) -> Tensor:
    """int8 [N/2, K] of int4 codes int8 [N, K], N even: two's complement, the even row in the low nibble."""
    return pack_row_pairs(codes).view(torch.int8)


def unpack_int4_pairs(packed: Tensor) -> Tensor:
    """int8 codes [N, K]; the inverse of `pack_int4_pairs`."""
    return signed_nibbles(unpack_row_pairs(packed.view(torch.uint8)))


def scale_bias_columns(module: str) -> int:
    """Columns of a linear's `scale_bias`: one, or a share for each of 16 devices."""
    return SPLIT_SHARES if module.rpartition(".")[2] in _SPLIT else 1


def scale_bias(values: Tensor, shares: int) -> Tensor:
    """float32 [N, shares]: eight times the sums of dequantized int4 weights float32 [N, K], over equal parts of K.

    The int4 kernel reads an int8 input as two nibbles, the lower one less 8, and adds this to make up for it.
    """
    parts = values.to(torch.float64).view(values.shape[0], shares, -1)
    return (8 * parts.sum(dim=2)).to(torch.float32)


def quant_bias(bias: Tensor, deq_scale: Tensor, offset: int, row_sums: Tensor) -> Tensor:
    """int32 [N] that the kernel adds to its sums: round(bias / deq_scale - offset * row_sums).

    bias, deq_scale: float32 [N]; row_sums: of the weight's codes, int64 [N]. ValueError beyond 32 bits.
    """
    steps = torch.round(bias.double() / deq_scale.double()) - offset * row_sums
    if steps.numel() and not (_INT32.min <= float(steps.min()) and float(steps.max()) <= _INT32.max):
        raise ValueError("a bias is more than 2^31 steps of its sums")
    return steps.to(torch.int32)


def bias_of_steps(steps: Tensor, deq_scale: Tensor, offset: int, row_sums: Tensor) -> Tensor:
    """float32 [N]: the bias that `quant_bias` stands for, to half a step."""
    return ((steps.to(torch.int64) + offset * row_sums).double() * deq_scale.double()).to(torch.float32)


def kv_cache_tensors(
    attention: str, key_scale: Tensor, value_scale: Tensor
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
    """(tensors, their types, settings of the description) of an int8 KV cache with a scale for each channel.

    attention: the module's name, such as `model.layers.0.self_attn`; scales: float32 [channels]. Offsets are zero, for
    decoding uses none.
    """
    tensors: dict[str, Tensor] = {}
    for projection, scale in (("k_proj", key_scale), ("v_proj", value_scale)):
        stem = f"{attention}.{projection}.kv_cache"
        tensors[f"{stem}_scale"] = scale.to(torch.float32)
        tensors[f"{stem}_offset"] = torch.zeros_like(tensors[f"{stem}_scale"])
    return tensors, dict.fromkeys(tensors, KV_TYPE), dict.fromkeys(KV_TYPE_KEYS, KV_TYPE)
