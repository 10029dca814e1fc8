"""One decoding step of a dense decoder as a single native call, for tokens that follow a cache of float32.

decode_step.c runs the layers and fast_linear.c the products. Families with other parts (latent attention, delta-nets,
experts, gated outputs) have no such step: they take the path of model.py.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.engine.cache_pages import Pages
from qwen_quantize.engine.fast_linear import FastGroup, Kind, LinearStruct, native_library, pool
from qwen_quantize.engine.kv_cache import KVCache
from qwen_quantize.engine.layer import Layer
from qwen_quantize.engine.linear import LinearGroup, MixedGroup, PlainGroup
from qwen_quantize.engine.rotary import LayerRotary
from qwen_quantize.engine.soft_cap import CappedGroup, soft_cap
from qwen_quantize.errors import UserError
from qwen_quantize.formats.native import load_native
from qwen_quantize.models.blueprint import Blueprint, Stream

SOURCE = Path(__file__).with_name("decode_step.c")
_OPTIONS = ("-ffp-contract=fast", "-Wno-psabi", "-lm")
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")  # in the order of decode_step.c
_POINTER, _I64, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
STRETCH = 64  # tokens that share a softmax, as in decode_step.c; pages are multiples of it
_WIDEST_HEAD = 1024  # the step holds a head on its stack


class _Threads(ctypes.Structure):
    _fields_ = (("pool", _POINTER), ("linear", _POINTER), ("parallel", _POINTER))


class _Group(ctypes.Structure):
    _fields_ = (("parts", _POINTER), ("sizes", _POINTER), ("count", _I64), ("size", _I64))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Group) for name in ("attention_input", "attention_output", "mlp_input", "mlp_hidden")),
        *((name, _POINTER) for name in ("input_norm", "query_norm", "key_norm", "attention_output_norm")),
        *((name, _POINTER) for name in ("mlp_norm", "mlp_output_norm")),
        *((name, _I64) for name in ("window", "local")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", _POINTER),
        ("final_norm", _POINTER),
        ("head", _Group),
        *((name, _I64) for name in ("count", "hidden", "inner", "heads", "key_heads", "head_size")),
        *((name, _I64) for name in ("rotary", "interleaved", "activation")),
        *((name, _F32) for name in ("epsilon", "scale", "score_cap")),
    )


class _State(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values", "key_places", "value_places", "cosine", "sine")),
        *((name, _I64) for name in ("batch", "capacity", "position", "page", "pages", "page_bytes", "file")),
        ("interleaved", _I64),
    )


class _PageTable:
    """Where the pages of a cache are, for as long as there are as many."""

    def __init__(self, cache: KVCache) -> None:
        self.pages = len(cache.keys[0])
        layers = len(cache.keys)

        def pointers(tensors: list[Pages[Tensor]]) -> ctypes.Array[Any]:
            found = [None if r is None else r.data_ptr() for pages in tensors for r in pages.rooms]
            return (_POINTER * (layers * self.pages))(*found)

        def places(tensors: list[Pages[Tensor]]) -> ctypes.Array[Any]:
            return (_I64 * layers)(*(pages.place for pages in tensors))

        self.pointers = pointers(cache.keys), pointers(cache.values)
        self.places = places(cache.keys), places(cache.values)


class DecodeStep:
    """The native step of one model. It keeps what its structures point to, and scratch memory between steps."""

    def __init__(
        self,
        blueprint: Blueprint,
        layers: Sequence[Layer],
        final_norm: Tensor,
        head: LinearGroup,
        rotary: LayerRotary,
    ) -> None:
        config, family = blueprint.config, blueprint.family
        self._kept: list[Any] = [layers, final_norm, head]
        self._rotary = rotary
        self._cap = head.cap if isinstance(head, CappedGroup) else None
        head = head.inner if isinstance(head, CappedGroup) else head
        sliding = config.sliding_layers or (False,) * config.num_layers
        # A layer of each rotation: without a rotation of its own a layer with a window has that of all.
        self._rotations = (
            sliding.index(False) if False in sliding else 0,
            sliding.index(True) if True in sliding else 0,
        )
        structs = (_Layer * len(layers))()
        for index, layer in enumerate(layers):
            one = structs[index]
            one.attention_input = self._group(layer.groups[Stream.ATTENTION_INPUT])
            one.attention_output = self._group(layer.groups[Stream.ATTENTION_OUTPUT])
            one.mlp_input = self._group(layer.groups[Stream.MLP_INPUT])
            one.mlp_hidden = self._group(layer.groups[Stream.MLP_HIDDEN])
            one.input_norm = layer.tensors[family.input_norm].data_ptr()
            one.mlp_norm = layer.tensors[family.mlp_norm].data_ptr()
            for field in ("query_norm", "key_norm", "attention_output_norm", "mlp_output_norm"):
                name = getattr(family, field)
                setattr(one, field, None if name is None else layer.tensors[name].data_ptr())
            one.window = config.window(index) or 0
            one.local = int(sliding[index])
        cos, _ = rotary.slice(0, 0, 1)
        self._model = _Model(
            layers=ctypes.addressof(structs),
            final_norm=final_norm.data_ptr(),
            head=self._group(head),
            count=len(layers),
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_heads,
            key_heads=config.num_kv_heads,
            head_size=config.head_dim,
            rotary=cos.shape[1],
            interleaved=int(config.rope.interleaved),
            activation=_ACTIVATIONS.index(config.activation),
            epsilon=config.rms_norm_eps,
            scale=config.head_dim**-0.5 if config.softmax_scale is None else config.softmax_scale,
            score_cap=config.score_cap or 0.0,
        )
        self._kept.append(structs)
        self._turns = torch.zeros(2, 2, cos.shape[1] // 2)  # [cosine, sine][rotation]
        self._scratch = torch.empty(0)
        self._table: tuple[weakref.ref[KVCache], _PageTable] | None = None

    def _group(self, group: LinearGroup) -> _Group:
        parts = [_struct_of(part) for part in _parts(group)]
        pointers = (_POINTER * len(parts))(*(ctypes.addressof(part) for part in parts))
        sizes = (_I64 * len(parts))(*(part.rows for part in parts))
        self._kept += [parts, pointers, sizes]
        return _Group(
            ctypes.addressof(pointers), ctypes.addressof(sizes), len(parts), sum(p.rows for p in parts)
        )

    def takes(self, tokens: Tensor, cache: KVCache | None) -> bool:
        """Whether this step can run: one token each, behind a cache of float32."""
        return tokens.shape[1] == 1 and type(cache) is KVCache and cache.page_tokens % STRETCH == 0

    def __call__(self, hidden: Tensor, cache: KVCache) -> Tensor:
        """Logits [B, 1, vocab] of hidden [B, 1, hidden_size], which is used up; the caller advances the cache."""
        threads, library = pool(), _step_library()
        assert threads is not None
        assert library is not None
        batch, position = hidden.shape[0], cache.length
        cache.reserve(1)
        if self._table is None or self._table[0]() is not cache or self._table[1].pages != len(cache.keys[0]):
            self._table = weakref.ref(cache), _PageTable(cache)
        table, tiers = self._table[1], cache.tiers
        half = self._turns.shape[2]
        for which, layer in enumerate(self._rotations):
            cos, sin = self._rotary.slice(layer, position, 1)
            self._turns[0, which], self._turns[1, which] = cos[0, :half], sin[0, :half]
        room = library.qq_decode_room(ctypes.byref(self._model), _I64(batch), _I64(cache.capacity))
        if self._scratch.numel() < room:
            self._scratch = torch.empty(room)
        logits = torch.empty(batch, 1, self._model.head.size)
        state = _State(
            *(ctypes.addressof(part) for part in (*table.pointers, *table.places)),
            *(self._turns[0].data_ptr(), self._turns[1].data_ptr()),
            *(batch, cache.capacity, position, cache.page_tokens, table.pages),
            *((0, -1) if tiers is None else (tiers.stride, tiers.file.descriptor)),
            int(cache.interleaved),
        )
        native = threads.library
        given = _Threads(
            threads.handle.value,
            ctypes.cast(native.qq_linear, _POINTER).value,
            ctypes.cast(native.qq_parallel, _POINTER).value,
        )
        with threads:
            failed = library.qq_decode(
                *(ctypes.byref(given), ctypes.byref(self._model), ctypes.byref(state)),
                *(_POINTER(x.data_ptr()) for x in (hidden, self._scratch, logits)),
            )
        if failed == -2:
            raise UserError("the key-value cache's file cannot be read back; set TMPDIR to another folder")
        if failed:
            raise MemoryError("no memory for an input as int8")
        return logits if self._cap is None else soft_cap(logits, self._cap)


def _step_library() -> ctypes.CDLL | None:
    library = load_native(SOURCE, libraries=_OPTIONS)
    if library is not None:
        library.qq_decode_room.restype = _I64
    return library


def _parts(group: LinearGroup) -> tuple[LinearGroup, ...]:
    return group.parts if isinstance(group, MixedGroup) else (group,)


def _fits(group: LinearGroup) -> bool:
    def plain(part: LinearGroup) -> bool:
        return isinstance(part, PlainGroup) and part.weight.is_contiguous()

    return all(plain(part) or (isinstance(part, FastGroup) and part.cast is None) for part in _parts(group))


def _struct_of(group: LinearGroup) -> LinearStruct:
    if isinstance(group, FastGroup):
        return group.struct()
    assert isinstance(group, PlainGroup)
    rows, columns = group.weight.shape
    bias = None if group.bias is None else group.bias.data_ptr()
    return LinearStruct(
        group.weight.data_ptr(), None, None, bias, rows, columns, columns, columns, Kind.FLOAT_ROWS, 0
    )


def decode_step(
    blueprint: Blueprint, layers: Sequence[Layer], final_norm: Tensor, head: LinearGroup, rotary: LayerRotary
) -> DecodeStep | None:
    """The native step of a model; None without a compiler, and for families and linears that have none."""
    config = blueprint.config
    others = (config.latent, config.delta, config.moe, config.indexer)
    if any(part is not None for part in others) or config.output_gate or config.head_dim > _WIDEST_HEAD:
        return None
    inner = head.inner if isinstance(head, CappedGroup) else head
    streams = (Stream.ATTENTION_INPUT, Stream.ATTENTION_OUTPUT, Stream.MLP_INPUT, Stream.MLP_HIDDEN)
    groups = [layer.groups[stream] for layer in layers for stream in streams]
    if not all(_fits(group) for group in (*groups, inner)):
        return None
    if native_library() is None or _step_library() is None:
        return None
    return DecodeStep(blueprint, layers, final_norm, head, rotary)
