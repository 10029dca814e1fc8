"""What becomes of every tensor of the source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from qwen_quantize.checkpoint.gguf_layout import GgufLayout
from qwen_quantize.checkpoint.layouts import Layout
from qwen_quantize.checkpoint.linear_parts import WEIGHT_SUFFIXES
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.writer import OutputTensor
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.models.blueprint import Blueprint
from qwen_quantize.pipeline.selection import Selection

_CACHE_SCALES = (".self_attn.k_scale", ".self_attn.v_scale", ".kv_cache_scale", ".kv_cache_offset")
_CONFIG_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class Action(StrEnum):
    """What becomes of a tensor."""

    QUANTIZE = "quantize"
    KEEP = "keep"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One source tensor and what is written for it; module: the linear it is the weight of, if it is one."""

    name: str
    action: Action
    outputs: tuple[OutputTensor, ...]
    why: str
    module: str | None = None


def module_of(name: str) -> str | None:
    """The module whose weight a tensor's name says it is."""
    for ending in WEIGHT_SUFFIXES:
        if name.endswith(ending):
            return name.removesuffix(ending)
    return None


def float_dtype(source: CheckpointSource) -> str:
    """The safetensors name of what config.json says the model computes in; BF16 where it does not say."""
    return _CONFIG_DTYPES.get(str(source.config.get("dtype") or source.config.get("torch_dtype")), "BF16")


def kept_dtype_in(layout: Layout, name: str, dtype: str, shape: Sequence[int]) -> str:
    """What a tensor that is not quantized is stored as; UserError where the layout has no place for it."""
    return layout.kept_dtype(name, dtype, shape) if isinstance(layout, GgufLayout) else dtype


def plan_tensors(
    source: CheckpointSource,
    linears: LinearReader,
    blueprint: Blueprint | None,
    selection: Selection,
    layout: Layout,
    schemes: Mapping[str, Scheme],
) -> tuple[tuple[TensorPlan, ...], tuple[str, ...]]:
    """(plans in writing order, notes); schemes: by module."""
    decoded_dtype = float_dtype(source)
    kept_dtype = decoded_dtype if source.kind == "gguf" else None
    companions = linears.companions()
    expected = blueprint.expected_tensors() if blueprint is not None else {}
    tied_head = (
        blueprint.family.head if blueprint is not None and blueprint.config.tie_word_embeddings else None
    )
    plans: dict[str, TensorPlan] = {}
    notes = []
    cached = ""
    for name in source.names():
        module = module_of(name)
        if name in companions:
            plans[name] = TensorPlan(
                name, Action.DROP, (), "scale of a quantized source weight, used while reading"
            )
        elif name.endswith(_CACHE_SCALES):
            plans[name] = TensorPlan(name, Action.DROP, (), "scale of the source's key-value cache")
            cached = cached or name
        elif module is not None and module in selection.quantized:
            shape = selection.quantized[module]
            outputs = layout.outputs(module, shape, schemes[module])
            plans[name] = TensorPlan(name, Action.QUANTIZE, outputs, "linear", module)
        elif name == tied_head:
            plans[name] = TensorPlan(name, Action.DROP, (), "tied to the embedding, stored once")
            notes.append(f"{name} is tied to the embedding and is stored once")
        elif module is not None and linears.is_quantized(module):
            shape = linears.describe(module).shape
            dtype = kept_dtype_in(layout, f"{module}.weight", decoded_dtype, shape)
            output = OutputTensor(f"{module}.weight", dtype, shape)
            plans[name] = TensorPlan(name, Action.KEEP, (output,), "decoded, as it is to be kept", module)
        else:
            info = source.info(name)
            why = _why_kept(name, blueprint, name in expected)
            dtype = kept_dtype_in(layout, name, kept_dtype or info.dtype, info.shape)
            output = OutputTensor(name, dtype, tuple(info.shape))
            plans[name] = TensorPlan(name, Action.KEEP, (output,), why)
    if cached:
        notes.append(
            f"the source's scales of a key-value cache, such as {cached!r}, are left out: they are of other weights, "
            "and --kv-cache finds new ones"
        )
    return tuple(plans[name] for name in _writing_order(plans, expected, blueprint is None)), tuple(notes)


def _why_kept(name: str, blueprint: Blueprint | None, known: bool) -> str:
    if not known and blueprint is not None:
        prefixes = tuple(blueprint.layer_name(layer, "") for layer in blueprint.next_token_layers)
        return "multi-token prediction" if name.startswith(prefixes) else "not part of the decoder; copied"
    if blueprint is not None and name == blueprint.family.embedding:
        return "embedding"
    if blueprint is not None and name == blueprint.family.head:
        return "head"
    if "norm" in name:
        return "norm"
    return "bias" if name.endswith("bias") else "kept"


def _writing_order(
    plans: Mapping[str, TensorPlan], expected: Mapping[str, tuple[int, ...]], as_stored: bool
) -> list[str]:
    """The model's own order, then whatever else the source holds, by name; without a blueprint the source's."""
    if as_stored:
        return list(plans)
    by_output = {output.name: plan.name for plan in plans.values() for output in plan.outputs[:1]}
    ordered = [by_output[name] for name in expected if name in by_output]
    return ordered + sorted(set(plans) - set(ordered))


def kept_matrices(tensors: Iterable[TensorPlan]) -> list[str]:
    """Modules with a matrix that is no linear here but may be one to a reader: routers, gates, joining layers."""
    return [
        tensor.name.removesuffix(".weight")
        for tensor in tensors
        if tensor.action is Action.KEEP
        and tensor.name.endswith(".weight")
        and len(tensor.outputs[0].shape) == 2
        and "embed" not in tensor.name
    ]
