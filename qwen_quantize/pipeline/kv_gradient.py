"""What errors of keys and values cost in the model's own predictions: one pass forwards, one backwards, by layer.

The gradient is that of the log-probability of tokens drawn from the predictions themselves. Its squares are in the
mean the diagonal of the Fisher information, which is the second derivative of the divergence between the model with
and without an error: half the sum of squared gradients times squared errors foretells that divergence, in nats.

The states that every layer reads stay on disk until the way back needs them, two files for each layer at most; memory
holds one layer, one window's activations of it, and one routed expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.calibrators.kv_statistics import KvStatistics
from qwen_quantize.engine.compute import Compute
from qwen_quantize.engine.experts import route, run_expert, shared_expert
from qwen_quantize.engine.layer import Layer
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.model import dense_mlp, mlp_input, run_attention
from qwen_quantize.engine.rotary import LayerRotary
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.errors import UserError
from qwen_quantize.formats.kv_scheme import KvScheme
from qwen_quantize.models.blueprint import Stream
from qwen_quantize.models.config import ModelConfig
from qwen_quantize.pipeline.hidden import HiddenStates, window_ranges
from qwen_quantize.pipeline.kv_observe import (
    LayerLook,
    Progress,
    Room,
    run_through,
    states_of,
    write_embedded,
)
from qwen_quantize.pipeline.memory import HEAD_ROWS


@torch.no_grad()
def observe_gradient(
    reader: ModelReader,
    windows: Tensor,
    scheme: KvScheme,
    chip: Compute | None = None,
    progress: Progress = lambda *_: None,
    room: Room | None = None,
) -> dict[int, KvStatistics]:
    """As `observe`, with damages in twice the nats of divergence for each token.

    UserError for models with delta-net layers, which nothing goes back through.
    """
    config = reader.blueprint.config
    require_way_back(config)
    room, model = room or Room(), StreamedModel(reader, chip)
    batches = window_ranges(windows.shape[0], room.windows)
    rotary = LayerRotary(config)  # the reader's may come from inference mode, which has no way back
    found: dict[int, KvStatistics] = {}
    with states_of(windows, config, room.folder) as states, states_of(windows, config, room.folder) as slopes:
        write_embedded(model, windows, states, batches)
        for index in range(model.num_layers):
            run_through(model, index, states, batches)
        _begin_at_the_head(StreamedModel(reader, chip), states, slopes)
        for index in reversed(range(model.num_layers)):
            look = LayerLook(reader, index, windows.shape[1], scheme, chip)
            layer = reader.read_layer(index, chip)
            with slopes.writing(index) as writer:
                for begin, end in batches:
                    before = states.read(index, begin, end)
                    after = slopes.read(index + 1, begin, end)
                    writer.append(through_layer(reader, layer, rotary, index, before, after, look))
            states.remove(index + 1)
            slopes.remove(index + 1)
            found[index] = look.statistics(unit=1.0)
            progress("key-value cache", model.num_layers - index, model.num_layers)
    return dict(sorted(found.items()))


def require_way_back(config: ModelConfig) -> None:
    """UserError for a model with layers that no gradient is computed through."""
    if config.delta is not None:
        raise UserError(
            "--importance gradient goes back through every layer, and delta-net layers have no way back here; leave it "
            "out"
        )


def _begin_at_the_head(model: StreamedModel, states: HiddenStates, slopes: HiddenStates) -> None:
    """Write the gradient by what the head reads."""
    model.open_head()
    with slopes.writing(model.num_layers) as writer:
        for window in range(states.shape[0]):
            generator = torch.Generator().manual_seed(window)
            parts = []
            for rows in torch.split(states.read(model.num_layers, window, window + 1)[0], HEAD_ROWS):
                leaf = rows.clone().requires_grad_()
                with torch.enable_grad():
                    predicted = model.log_probabilities(leaf)
                    drawn = torch.multinomial(predicted.detach().exp(), 1, generator=generator)
                    (slope,) = torch.autograd.grad(predicted.gather(1, drawn).sum(), leaf)
                parts.append(slope)
            writer.append(torch.cat(parts).unsqueeze(0))


def through_layer(
    reader: ModelReader,
    layer: Layer,
    rotary: LayerRotary,
    index: int,
    before: Tensor,
    after: Tensor,
    look: LayerLook,
) -> Tensor:
    """The gradient by what a layer reads. before: [B, T, hidden], that; after: the gradient by what it gives."""
    blueprint = reader.blueprint
    attended = torch.cat(
        [run_attention(one, layer, index, blueprint, rotary) for one in torch.split(before, 1)]
    )
    slopes = _through_mlp(reader, layer, index, attended, after)
    parts: list[Tensor] = []
    for one, slope in zip(torch.split(before, 1), torch.split(slopes, 1), strict=True):
        look.add(one, slope)
        leaf = one.clone().requires_grad_()
        with torch.enable_grad():
            read = run_attention(leaf, layer, index, blueprint, rotary)
        parts += torch.autograd.grad(read, leaf, slope)
    return torch.cat(parts)


def _through_mlp(reader: ModelReader, layer: Layer, index: int, attended: Tensor, after: Tensor) -> Tensor:
    blueprint = reader.blueprint
    sparse = blueprint.sparse(index) is not None
    parts: list[Tensor] = []
    for one, slope in zip(torch.split(attended, 1), torch.split(after, 1), strict=True):
        leaf = one.clone().requires_grad_()
        with torch.enable_grad():
            normed = mlp_input(leaf, layer, blueprint)
            if not sparse:
                read = leaf + dense_mlp(normed, layer, blueprint)
            elif Stream.SHARED_INPUT in layer.groups:
                read = leaf + shared_expert(normed, layer, blueprint)
            else:
                read = leaf
        parts += torch.autograd.grad(read, leaf, slope)
    slopes = torch.cat(parts)
    return slopes + _through_experts(reader, layer, index, attended, after) if sparse else slopes


def _through_experts(
    reader: ModelReader, layer: Layer, index: int, attended: Tensor, after: Tensor
) -> Tensor:
    """What routed experts and their router add to the gradient; every expert is read once, and freed."""
    blueprint = reader.blueprint
    assert layer.experts is not None
    leaf = attended.flatten(0, 1).clone().requires_grad_()
    slope = after.flatten(0, 1)
    with torch.enable_grad():
        normed = mlp_input(leaf, layer, blueprint)
        routing = route(normed, layer, index, blueprint)
    by_normed, by_weight = torch.zeros_like(slope), torch.zeros_like(routing.weights)
    for expert in torch.unique(routing.indices).tolist():
        tokens, place = (routing.indices == expert).nonzero(as_tuple=True)
        groups = layer.experts(expert)
        rows = normed.detach()[tokens].requires_grad_()
        with torch.enable_grad():
            given = run_expert(rows, groups, blueprint.config.activation)
        by_weight[tokens, place] = (given.detach() * slope[tokens]).sum(dim=-1)
        along = slope[tokens] * routing.weights[tokens, place].unsqueeze(1)
        by_normed.index_add_(0, tokens, *torch.autograd.grad(given, rows, along))
        del groups, given  # freed before the next one is read
    (found,) = torch.autograd.grad((normed, routing.weights), leaf, (by_normed, by_weight))
    return found.view_as(after)
