"""Keys and values of text that runs through a model, looked at one layer at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qwen_quantize.calibrators.kv_sides import mixed_elements, turned_channels
from qwen_quantize.calibrators.kv_statistics import (
    AttentionSample,
    KvStatistics,
    LatentSample,
    SideObserver,
    Sight,
    derivatives,
    latent_derivative,
    random_direction,
)
from qwen_quantize.engine.attention import project_grouped
from qwen_quantize.engine.compute import Compute
from qwen_quantize.engine.context_attention import visible
from qwen_quantize.engine.latent_attention import project_latent
from qwen_quantize.engine.layer import Layer, rms_norm
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.rotary import rotate, rotate_back
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.formats.kv_scheme import KvElement, KvKind, KvScheme
from qwen_quantize.models.blueprint import Half, Stream
from qwen_quantize.models.config import ModelConfig
from qwen_quantize.pipeline.hidden import HiddenStates, window_ranges

Progress = Callable[[str, int, int], None]

_WINDOWS_SCORED = 1


@dataclass(frozen=True, slots=True)
class Room:
    """What text may take on its way through the model. windows: that are in memory together.

    folder: where the states of all of them lie between two layers; None for the system's folder of temporary files.
    """

    windows: int = 8
    folder: Path | None = None


@torch.no_grad()
def observe(
    reader: ModelReader,
    windows: Tensor,
    scheme: KvScheme,
    chip: Compute | None = None,
    progress: Progress = lambda *_: None,
    room: Room = Room(),
) -> dict[int, KvStatistics]:
    """Statistics of every layer with attention, from windows [n, T] that run through the model once.

    Memory holds one layer and one batch of windows; scores, one head's of one window.
    """
    config = reader.blueprint.config
    model = StreamedModel(reader, chip)
    batches = window_ranges(windows.shape[0], room.windows)
    found: dict[int, KvStatistics] = {}
    with states_of(windows, config, room.folder) as states:
        write_embedded(model, windows, states, batches)
        for index in range(model.num_layers):
            if not config.is_delta(index):
                look = LayerLook(reader, index, windows.shape[1], scheme, chip)
                for begin, end in window_ranges(windows.shape[0], _WINDOWS_SCORED):
                    part = states.read(index, begin, end)
                    look.add(part, random_direction(part, _generator(index, begin)))
                found[index] = look.statistics()
                del look  # attention was read to look at it, and is free again before the layer is
            progress("key-value cache", index + 1, model.num_layers)
            if index + 1 == model.num_layers:
                break
            run_through(model, index, states, batches)
            states.remove(index)
    return found


def write_embedded(
    model: StreamedModel, windows: Tensor, states: HiddenStates, batches: Sequence[tuple[int, int]]
) -> None:
    """Write what the first layer reads of windows [n, T]."""
    with states.writing(0) as writer:
        for begin, end in batches:
            writer.append(model.embed(windows[begin:end]))


def run_through(
    model: StreamedModel, index: int, states: HiddenStates, batches: Sequence[tuple[int, int]]
) -> None:
    """Write what the layer behind this one reads, from what this one reads."""
    model.open_layer(index)
    with states.writing(index + 1) as writer:
        for begin, end in batches:
            writer.append(model.run_layer(states.read(index, begin, end)))
    model.close_layer()


def _generator(layer: int, window: int) -> torch.Generator:
    """A window's own draws in each layer, however windows come in batches."""
    return torch.Generator().manual_seed((layer << 32) + window)


@contextmanager
def states_of(windows: Tensor, config: ModelConfig, folder: Path | None) -> Iterator[HiddenStates]:
    """States of all windows, numbered by the layer that reads them; nothing of them is left afterwards."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="qwen_quantize-", dir=folder) as name:
        yield HiddenStates(Path(name), windows.shape[0], windows.shape[1], config.hidden_size)


class LayerLook:
    """One layer's attention, read from disk, and what has been seen of its keys and values."""

    def __init__(
        self, reader: ModelReader, index: int, length: int, scheme: KvScheme, chip: Compute | None
    ) -> None:
        self._reader, self._index, self._unrotated = reader, index, scheme.unrotated
        self._layer: Layer = reader.read_half(index, Half.ATTENTION, chip)
        blueprint, config = reader.blueprint, reader.blueprint.config
        sites = blueprint.streams(index, Half.ATTENTION)
        self._expansion: Tensor | None = None
        if config.latent is not None:
            (site,) = sites[Stream.KEY_VALUE_LATENT]
            weight = reader.read_linear(blueprint.module_name(index, site))
            self._expansion = weight.view(config.num_heads, -1, config.latent.key_value_rank)
        (site,) = sites[Stream.ATTENTION_OUTPUT]
        projection = reader.read_linear(blueprint.module_name(index, site))
        scale = config.head_dim**-0.5 if config.softmax_scale is None else config.softmax_scale
        seen = visible(length, length, config.window(index))
        elements: Sequence[Sequence[KvElement]] = ((), ())
        if scheme.kind is KvKind.MIXED:
            elements = mixed_elements(scheme, config)
        step = max((element.tokens for side in elements for element in side), default=1)
        quantized = _quantized(scheme, length, step) & seen
        self._sight = Sight(seen, quantized, scale, config.score_cap, projection)
        self._sides = [SideObserver(elements[0], turned_channels(scheme, config)), SideObserver(elements[1])]
        self._stream, self._windows = 0.0, 0

    def add(self, stream: Tensor, direction: Tensor) -> None:
        """stream: [B, T, hidden], what the layer's attention reads and adds to; direction: as large."""
        blueprint, rotary = self._reader.blueprint, self._reader.rotary
        normed = rms_norm(
            stream, self._layer.tensors[blueprint.family.input_norm], blueprint.config.rms_norm_eps
        )
        if self._expansion is not None:
            own = project_latent(normed, self._layer, self._index, blueprint, rotary)
            latents = LatentSample(
                own.query, own.latent, own.positional.squeeze(1), self._expansion, self._sight
            )
            self._sides[0].add(own.latent.unsqueeze(1), latent_derivative(latents, direction).unsqueeze(1))
        else:
            grouped = project_grouped(
                normed, self._layer, self._index, blueprint, rotary, rotate_keys=not self._unrotated
            )
            turn, interleaved = (
                rotary.slice(self._index, 0, stream.shape[1]),
                blueprint.config.rope.interleaved,
            )
            read = rotate(grouped.key, *turn, interleaved) if self._unrotated else grouped.key
            sample = AttentionSample(grouped.query, read, grouped.value, self._sight, grouped.gate)
            by_key, by_value = derivatives(sample, direction)
            if self._unrotated:
                by_key = rotate_back(by_key, *turn, interleaved)
            self._sides[0].add(grouped.key, by_key)
            self._sides[1].add(grouped.value, by_value)
        self._stream += float(stream.square().sum(dim=-1).mean()) * stream.shape[0]
        self._windows += stream.shape[0]

    def statistics(self, unit: float | None = None) -> KvStatistics:
        """Damages in parts of `unit`, of the stream's second moment where there is none."""
        unit = self._stream / max(self._windows, 1) if unit is None else unit
        keys = self._sides[0].statistics(unit)
        return KvStatistics(keys, None if self._expansion is not None else self._sides[1].statistics(unit))


def _quantized(scheme: KvScheme, length: int, step: int) -> Tensor:
    """[T, T] bool: keys that a decoder with this cache has quantized when it comes to each query.

    step: tokens that are quantized together. All but the sinks where the windows are too short for any to be.
    """
    columns = torch.arange(length)
    waiting = (columns + 1 - scheme.window - scheme.sinks).clamp(min=0)  # of each query
    bounds = scheme.sinks + torch.div(waiting, step, rounding_mode="floor") * step
    mask = (columns >= scheme.sinks) & (columns < bounds.unsqueeze(1))
    return mask if bool(mask.any()) else columns.expand(length, length) >= scheme.sinks
