"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values are expanded from a latent that all heads share; a small part of each key carries the position
and is the same for all heads. The plain cache holds expanded keys and values: every token is expanded once, by
the same linear (and cast) as without a cache. A packed cache holds latents, which take less memory and a product
more per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.engine.context_attention import attend_context, visible
from qwen_quantize.engine.kv_cache import AttentionCache, Context
from qwen_quantize.engine.layer import Layer, rms_norm
from qwen_quantize.engine.rotary import LayerRotary, rotate
from qwen_quantize.engine.sparse_index import index_scores, select_tokens
from qwen_quantize.models.blueprint import Blueprint, Stream

_KEY_NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class ProjectedLatent:
    """query: [B, heads, T, key_dim], rotated; latent: [B, T, rank]; positional: [B, 1, T, rotary_dim], rotated.

    turn: cos and sin of the tokens. index: what the indexer's own linears gave, where there is one.
    """

    query: Tensor
    latent: Tensor
    positional: Tensor
    turn: tuple[Tensor, Tensor]
    index: tuple[Tensor, ...]


def mix_latent(
    normed: Tensor,
    layer: Layer,
    index: int,
    blueprint: Blueprint,
    rotary: LayerRotary,
    cache: AttentionCache | None,
) -> Tensor:
    """normed: [B, T, hidden_size] -> what the output projection reads, [B, T, heads * value_dim]."""
    config = blueprint.config
    own = project_latent(normed, layer, index, blueprint, rotary, 0 if cache is None else cache.length)
    context = _context(own.latent, own.positional, layer, index, blueprint, cache)
    chosen = None
    if config.indexer is not None:
        index_query, index_key = own.index
        chosen = _choose_tokens((normed, index_query, index_key), own.turn, layer, index, blueprint, cache)
    return attend_context(own.query, context, None, config.softmax_scale, chosen=chosen)


def project_latent(
    normed: Tensor, layer: Layer, index: int, blueprint: Blueprint, rotary: LayerRotary, start: int = 0
) -> ProjectedLatent:
    """Queries and latents of normed [B, T, hidden_size], whose first token is at position `start`."""
    config, family, latent = blueprint.config, blueprint.family, blueprint.config.latent
    assert latent is not None
    assert family.key_value_latent_norm is not None
    batch, length, _ = normed.shape
    query, compressed, *index_key = layer.groups[Stream.ATTENTION_INPUT](normed)
    index_query: list[Tensor] = []
    if latent.query_rank is not None:
        assert family.query_latent_norm is not None
        query = rms_norm(query, layer.tensors[family.query_latent_norm], latent.norm_eps)
        query, *index_query = layer.groups[Stream.QUERY_LATENT](query)
    query = query.view(batch, length, config.num_heads, latent.key_dim).transpose(1, 2)
    shared, positional = torch.split(compressed, [latent.key_value_rank, latent.rotary_dim], dim=-1)
    shared = rms_norm(shared, layer.tensors[family.key_value_latent_norm], latent.norm_eps)
    cos, sin = rotary.slice(index, start, length)
    query = torch.cat(
        (
            query[..., : latent.position_free_dim],
            rotate(query[..., latent.position_free_dim :], cos, sin, config.rope.interleaved),
        ),
        dim=-1,
    )
    positional = rotate(positional.unsqueeze(1), cos, sin, config.rope.interleaved)
    return ProjectedLatent(query, shared, positional, (cos, sin), (*index_query, *index_key))


def _context(
    shared: Tensor,
    positional: Tensor,
    layer: Layer,
    index: int,
    blueprint: Blueprint,
    cache: AttentionCache | None,
) -> Context:
    """Expanded keys and values. shared: latents [B, T, rank]; positional: [B, 1, T, rotary_dim], turned."""
    if cache is None:
        return Context.whole(*_expanded(shared, positional, layer, blueprint))
    if not cache.keeps_latents:
        return cache.append(index, *_expanded(shared, positional, layer, blueprint))
    kept = cache.append(index, shared.unsqueeze(1), positional)

    def read(block: int) -> tuple[Tensor, Tensor]:
        latents, turned = kept.read(block)
        return _expanded(latents.squeeze(1), turned, layer, blueprint)

    return Context(kept.spans, read, kept.columns)


def _expanded(
    shared: Tensor, positional: Tensor, layer: Layer, blueprint: Blueprint
) -> tuple[Tensor, Tensor]:
    """(keys, values), [B, heads, S, key_dim] and [B, heads, S, value_dim]."""
    config, latent = blueprint.config, blueprint.config.latent
    assert latent is not None
    (expanded,) = layer.groups[Stream.KEY_VALUE_LATENT](shared)
    expanded = expanded.view(*shared.shape[:2], config.num_heads, -1).transpose(1, 2)
    free, value = torch.split(expanded, [latent.position_free_dim, latent.value_dim], dim=-1)
    return torch.cat((free, positional.expand(-1, config.num_heads, -1, -1)), dim=-1), value


def _choose_tokens(
    inputs: tuple[Tensor, Tensor, Tensor],
    turn: tuple[Tensor, Tensor],
    layer: Layer,
    index: int,
    blueprint: Blueprint,
    cache: AttentionCache | None,
) -> Tensor | None:
    """[B, T, S] bool, the tokens that the indexer lets each query see; None where it leaves none out.

    inputs: (normed hidden states, the indexer's queries, its keys), straight from their linears; turn: cos and
    sin, which here turn the two halves of the rotated part, whatever attention does.
    """
    names, indexer = blueprint.family.indexer, blueprint.config.indexer
    assert names is not None
    assert indexer is not None
    normed, query, key = inputs
    batch, length, _ = normed.shape
    key = functional.layer_norm(
        key,
        (indexer.head_dim,),
        layer.tensors[names.key_norm],
        layer.tensors[names.key_norm_bias],
        _KEY_NORM_EPSILON,
    )
    key = rotate(key.unsqueeze(1), *turn).squeeze(1)
    if cache is not None:
        key = cache.append_index(index, key)
    if key.shape[1] <= indexer.top_k:
        return None
    query = query.view(batch, length, indexer.heads, indexer.head_dim).transpose(1, 2)
    query = rotate(query, *turn).transpose(1, 2)
    weights = functional.linear(normed, layer.tensors[names.weights])
    return select_tokens(
        index_scores(query, key, weights), visible(length, key.shape[1], None), indexer.top_k
    )
