"""The rules of Ascend's layout: int8, int4 and MX tensors, and one type for each in `quant_model_description.json`.

The types, tensors, dtypes and shapes are msModelSlim's; what becomes of them is vllm-ascend's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qwen_quantize.checkpoint.ascend_description import DESCRIPTION_FILE as DESCRIPTION
from qwen_quantize.checkpoint.ascend_description import FLOAT, MX_GROUP
from qwen_quantize.checkpoint.ascend_packing import scale_bias_columns
from qwen_quantize.checkpoint.contract_folder import ModelFolder, shown_json
from qwen_quantize.checkpoint.contract_linear import PLAIN, CheckedLinear, LayoutCheck, ModuleParts
from qwen_quantize.checkpoint.finding import Severity

_WIDEST = 65_535  # the last dimensions that npu_quant_matmul takes


@dataclass(frozen=True, slots=True)
class AscendType:
    """Tensors of a type. weight: its dtype; packed: (rows, columns) of elements in a stored one.

    scaled: whether there are `weight_scale` and `weight_offset` for each row; static: whether the input's scale is
    stored; mx: whether scales are exponents of groups of 32; bias: whether `scale_bias` is stored.
    """

    weight: str = "I8"
    packed: tuple[int, int] = (1, 1)
    scaled: bool = True
    offset: bool = True
    static: bool = False
    mx: bool = False
    bias: bool = False


TYPES: dict[str, AscendType] = {
    "W8A8": AscendType(scaled=False, offset=False, static=True),
    "W8A8_DYNAMIC": AscendType(),
    "W8A8_MIX": AscendType(static=True),
    "W8A16": AscendType(),
    "W4A8_DYNAMIC": AscendType(packed=(2, 1), bias=True),
    "W4A4_DYNAMIC": AscendType(),
    "W4A4_FLATQUANT_DYNAMIC": AscendType(),
    "WFP8AFP8_DYNAMIC": AscendType(weight="F8_E4M3", offset=False),
    "W8A8_MXFP8": AscendType(weight="F8_E4M3", offset=False, mx=True),
    "W4A8_MXFP": AscendType(weight="U8", packed=(1, 2), offset=False, mx=True),
    "W4A4_MXFP4": AscendType(weight="U8", packed=(1, 2), offset=False, mx=True),
}
# Types whose tensors are not checked one by one, and those of scales beside weights.
_OTHER_TYPES = frozenset(
    {
        "W4A16", "W4A4_MXFP4_DUALSCALE", "W4A4_MXFP4_SVD", "W4A4_MXFP4_FLATQUANT", "W8A8S", "W8A8SC", "W16A16S",
        "W16A16SC", "W8A8_TIMESTEP", "NF4", "C8", "FAQuant", "FAKQuant",
    }
)  # fmt: skip
_INPUT_PARTS = ("input_scale", "input_offset")
_KV_PARTS = ("kv_cache_scale", "kv_cache_offset")
_DTYPES = {"torch.float16": "float16", "torch.bfloat16": "bfloat16"}


def check_ascend(folder: ModelFolder, settings: Mapping[str, Any]) -> LayoutCheck:
    """settings: the object of the description."""
    check = LayoutCheck()
    if "quantization_config" in folder.config:
        check.add(
            "config.json",
            "leftover-config",
            f"it has a quantization_config beside {DESCRIPTION}; loaders may take that scheme and read these "
            "weights by it",
            "remove quantization_config from config.json",
        )
    types = _types(folder, settings, check)
    for module in folder.modules:
        _check_module(ModuleParts(folder, module, check), types, folder)
    _check_globals(settings, set(types.values()), check)
    _check_cache(folder, settings, check)
    return check


def _types(folder: ModelFolder, settings: Mapping[str, Any], check: LayoutCheck) -> dict[str, str]:
    """Tensor -> type, for the tensors that are there and described."""
    types = {}
    layers = folder.config.get("num_hidden_layers")
    for tensor in folder.tensors:
        found = settings.get(tensor)
        if found is None:
            beyond = _layer(tensor)
            extra = beyond is not None and type(layers) is int and beyond >= layers
            check.add(
                tensor,
                "mtp-undescribed" if extra else "description-missing",
                f"{DESCRIPTION} has no entry for it; vllm-ascend stops with a KeyError when it builds the layer",
                f'add "{tensor}": "FLOAT", or its type',
            )
        elif not isinstance(found, str) or found not in (FLOAT, *TYPES, *_OTHER_TYPES):
            check.add(
                tensor,
                "description-type",
                f"its type is {shown_json(found)}, which msModelSlim does not write and no engine registers",
                f"name one of {', '.join((FLOAT, *TYPES))}",
            )
        else:
            types[tensor] = found
    for key, value in settings.items():
        described = key.rpartition(".")[2] in ("weight", "bias", "weight_scale", "deq_scale", *_KV_PARTS)
        if described and isinstance(value, str) and key not in folder.tensors:
            check.add(
                key,
                "description-stale",
                f"{DESCRIPTION} gives it the type {value[:40]} and no file holds it; engines build a layer whose "
                "weights "
                "never come",
                "write weights and description together",
            )
    return types


def _layer(tensor: str) -> int | None:
    parts = tensor.split(".")
    for before, number in itertools.pairwise(parts):
        if before == "layers" and number.isascii() and number.isdigit() and len(number) < 8:
            return int(number)
    return None


def _check_module(parts: ModuleParts, types: Mapping[str, str], folder: ModelFolder) -> None:
    named = {suffix: types[parts.name(suffix)] for suffix in parts.suffixes if parts.name(suffix) in types}
    kind = named.get("weight")
    weight = parts.info("weight")
    if kind is None or weight is None:
        return
    if kind == FLOAT:
        if weight.dtype not in PLAIN:
            parts.check.add(
                weight.name,
                "description-type",
                f"its type is FLOAT and its dtype {weight.dtype}; vllm-ascend loads the codes as if they were "
                "weights",
                "name the type in which it is quantized",
            )
        return
    odd = next((s for s, one in named.items() if one not in (kind, FLOAT, "C8", "FAKQuant")), None)
    if odd is not None:
        parts.check.add(
            parts.name(odd),
            "description-mixed",
            f"its type is {named[odd]} and that of the module's weight {kind}; the engine goes by the weight's and "
            "does "
            "not look for this tensor",
            "give all tensors of a module one type",
        )
    parts.check.known |= {parts.name(s) for s in parts.suffixes if s not in _KV_PARTS}
    record = TYPES.get(kind)
    if record is None:  # engines have their say about it, the tensors are not looked at
        parts.take(CheckedLinear(parts.module, f"ascend {kind}", None, form=kind))
        return
    if parts.matrix("weight", (record.weight,)) is None:
        return
    _check_parts(parts, kind, record, folder)


def _check_parts(parts: ModuleParts, kind: str, record: AscendType, folder: ModelFolder) -> None:
    weight = parts.info("weight")
    assert weight is not None
    rows, columns = weight.shape[0] * record.packed[0], weight.shape[1] * record.packed[1]
    if record.mx:
        if columns % MX_GROUP:
            parts.check.add(
                weight.name,
                "group-partial",
                f"groups of {MX_GROUP} do not divide {columns} input features; npu_dynamic_mx_quant takes whole "
                "ones",
                "leave the linear FLOAT",
            )
        scale = parts.part("weight_scale", ("U8",), [(rows, -(-columns // MX_GROUP))])
        if scale is not None:
            parts.exponents("weight_scale")
    elif record.scaled and parts.part("weight_scale", ("F32",), [(rows, 1)]) is not None:
        parts.positive("weight_scale", signed=kind.startswith("W4"))
    if record.offset and parts.part("weight_offset", ("F32",), [(rows, 1)], rule="offset") is not None:
        _require_zero(parts, "weight_offset")
    if record.bias:
        parts.part("scale_bias", ("F32",), [(rows, scale_bias_columns(parts.module))], rule="scale-bias")
    if record.static:
        _check_static(parts, rows, folder)
    if record.weight == "I8" and record.packed == (1, 1) and kind.startswith("W4"):
        _check_nibbles(parts)
    if max(rows, columns) > _WIDEST:
        parts.check.add(
            weight.name,
            "ascend-width",
            f"one of its sides {[rows, columns]} is above {_WIDEST}, the most that npu_quant_matmul takes",
            "leave the linear FLOAT",
        )
    parts.take(
        CheckedLinear(
            parts.module,
            f"ascend {kind}",
            (rows, columns),
            region=(record.packed[0], MX_GROUP if record.mx else 1),
            group=MX_GROUP if record.mx else 0,
            casts_inputs="A16" not in kind,
            form=kind,
        )
    )


def _check_static(parts: ModuleParts, rows: int, folder: ModelFolder) -> None:
    for suffix in _INPUT_PARTS:
        if parts.part(suffix, ("F32", "BF16", "F16"), [(1,)], rule="input-scale") is None:
            continue
        if suffix == "input_scale":
            parts.positive(suffix, rule="input-scale-value")
        else:
            _require_int8(parts, suffix)
    parts.part("quant_bias", ("I32",), [(rows,)], rule="quant-bias")
    info = parts.part("deq_scale", ("F32", "I64"), [(rows,)], rule="deq-scale")
    if info is None:
        return
    stated = folder.config.get("torch_dtype", folder.config.get("dtype"))
    dtype = _DTYPES.get(str(stated), str(stated))
    if (info.dtype == "I64") != (dtype == "float16"):
        parts.check.add(
            info.name,
            "deq-scale-dtype",
            f"it is {info.dtype} and config.json says {dtype}; the operator takes float32 for bfloat16 models and "
            "the bits "
            "of float32 in int64 for float16 ones, and otherwise copies numbers around 1e9 without an error",
            "write F32 for bfloat16, I64 (the float32's bits, sign-extended) for float16",
        )
    elif info.dtype == "F32":
        parts.positive("deq_scale")
    else:
        stored = parts.read("deq_scale")
        if stored is not None and not bool((stored.to(torch.int32).view(torch.float32) > 0).all()):
            parts.check.add(
                info.name,
                "scale-value",
                "the float32 bits in it are not all positive numbers; outputs come out as zeros or with the wrong "
                "sign",
                "write the bits of input_scale * weight_scale",
            )


def _require_zero(parts: ModuleParts, suffix: str) -> None:
    stored = parts.read(suffix)
    if stored is not None and bool((stored != 0).any()):
        parts.check.add(
            parts.name(suffix),
            "offset",
            "it is not zero; vllm-ascend passes it to an operator that adds it or leaves it out, where msModelSlim "
            "subtracts",
            "quantize symmetrically",
        )


def _require_int8(parts: ModuleParts, suffix: str) -> None:
    stored = parts.read(suffix)
    if stored is None:
        return
    values = stored.float()
    if not bool(((values >= -128) & (values <= 127) & (values == values.round())).all()):
        parts.check.add(
            parts.name(suffix),
            "offset",
            f"it holds {float(values.flatten()[0]):g}; the engine casts it to int8",
            "store a whole number from -128 to 127",
        )


def _check_nibbles(parts: ModuleParts) -> None:
    """Bytes of W4A4 hold one int4 each, and are packed when they are loaded."""
    stored = parts.read("weight")
    if stored is not None and bool(((stored < -8) | (stored > 7)).any()):
        parts.check.add(
            parts.name("weight"),
            "weight-range",
            "a byte is outside -8 .. 7; the engine packs the low nibble alone",
            "store one int4 value per byte",
        )


def _check_globals(settings: Mapping[str, Any], kinds: set[str], check: LayoutCheck) -> None:
    size = settings.get("group_size")
    if any(kind in TYPES and TYPES[kind].mx for kind in kinds) and size not in (None, MX_GROUP):
        check.add(
            DESCRIPTION,
            "group-size",
            f"group_size is {shown_json(size)}, one number for the whole file, and the MX weights have groups of 32; "
            "vllm-ascend shapes their scales by it",
            "set group_size to 32",
        )
    stated = settings.get("model_quant_type")
    if stated is None:
        check.add(
            DESCRIPTION,
            "description-type",
            "it has no model_quant_type; msModelSlim always writes one and tools choose by it",
            "name the type of most linears",
            Severity.WARNING,
        )
    elif stated not in (FLOAT, *kinds):
        check.add(
            DESCRIPTION,
            "description-type",
            f"model_quant_type is {shown_json(stated)}, and no tensor has that type",
            "name the type of most linears",
            Severity.WARNING,
        )


def _check_cache(folder: ModelFolder, settings: Mapping[str, Any], check: LayoutCheck) -> None:
    scales = [name for name in folder.tensors if name.endswith(".kv_cache_scale")]
    stated = settings.get("kv_cache_type", settings.get("kv_quant_type"))
    if bool(scales) != (stated == "C8"):
        check.add(
            scales[0] if scales else DESCRIPTION,
            "kv-type",
            f"kv_cache_type is {shown_json(stated)} and {len(scales)} kv_cache_scale tensors are there; the engine "
            "then "
            "leaves the cache in 16 bits, or looks for scales that do not exist",
            'write "kv_cache_type": "C8" exactly where the scales are stored',
        )
    for name in scales:
        parts = ModuleParts(folder, name.rpartition(".")[0], check)
        check.known |= {parts.name(suffix) for suffix in _KV_PARTS}
        parts.positive("kv_cache_scale")
        if parts.part(
            "kv_cache_offset", ("F32", "BF16", "F16"), None, rule="offset", beside="kv_cache_scale"
        ):
            _require_zero(parts, "kv_cache_offset")
        other = (
            name.replace(".k_proj.", ".v_proj.")
            if ".k_proj." in name
            else name.replace(".v_proj.", ".k_proj.")
        )
        if other not in folder.tensors:
            check.add(
                other,
                "kv-scale",
                f"{name!r} is there without it; keys and values are cached together",
                "store the scales of both",
            )
