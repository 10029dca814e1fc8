"""Where a factor may move from a tensor to the linears behind it without changing what a layer computes.

A producer makes each feature of a stream, its readers multiply each feature with a column. Dividing the
producer's feature j by s_j and multiplying the readers' column j by s_j changes nothing but what rounding makes
of them (AWQ, arXiv 2306.00978; SmoothQuant, arXiv 2211.10438). That holds only where every reader is known, and
where nothing but products and the sums over features stand between: not across softmax, rotation or a norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from qwen_quantize.models.blueprint import Blueprint, Half, LinearSite, Stream


@dataclass(frozen=True, slots=True)
class NormProducer:
    """The weight of a norm, [features]. offset: what is added to the stored tensor before it is used."""

    suffix: str
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class RowsProducer:
    """Rows of a linear (and of its bias): `heads` runs of `size` rows, each `stride` after the one before."""

    site: LinearSite
    first_row: int
    heads: int
    size: int
    stride: int

    def rows(self) -> tuple[int, ...]:
        """The row that makes each feature, in order."""
        starts = range(self.first_row, self.first_row + self.heads * self.stride, self.stride)
        return tuple(row for start in starts for row in range(start, start + self.size))


@dataclass(frozen=True, slots=True)
class SharedFeatures:
    """Runs of `size` features that several runs of the readers' columns share, so that their factor is one.

    Columns come run by run, the `copies` of a run side by side: the query heads that read one head's values, or
    the heads of a delta-net behind the one norm that all of them use.
    """

    runs: int
    copies: int
    size: int

    def features(self) -> tuple[int, ...]:
        """The feature whose factor each of the runs * copies * size columns has."""
        return tuple(
            run * self.size + feature
            for run in range(self.runs)
            for _ in range(self.copies)
            for feature in range(self.size)
        )


@dataclass(frozen=True, slots=True)
class ScalePair:
    """A producer and everything that reads what it makes.

    readers: linears that may be quantized; a path with `{expert}` stands for that linear of every routed expert.
    tensor_readers: suffixes of matrices that are no such linears (router, gates); they too must be multiplied.
    features: how many factors there are. tie: None where each column has a factor of its own.
    """

    stream: Stream
    readers: tuple[LinearSite, ...]
    producer: NormProducer | RowsProducer
    features: int
    tensor_readers: tuple[str, ...] = ()
    tie: SharedFeatures | None = None

    def for_expert(self, expert: int) -> ScalePair:
        """The pair inside one routed expert: every path with its number filled in."""

        def filled(site: LinearSite) -> LinearSite:
            return replace(site, path=site.path.replace("{expert}", str(expert)))

        producer = self.producer
        if isinstance(producer, RowsProducer):
            producer = replace(producer, site=filled(producer.site))
        return replace(self, readers=tuple(map(filled, self.readers)), producer=producer)


def scale_pairs(blueprint: Blueprint, layer: int, half: Half) -> tuple[ScalePair, ...]:
    """The pairs of half a layer in the order in which it runs them; those inside routed experts are left out.

    A stream without a pair has a producer that no factor passes through.
    """
    pairs = _attention_pairs(blueprint, layer) if half is Half.ATTENTION else _mlp_pairs(blueprint, layer)
    return tuple(pair for pair in pairs if pair is not None)


def expert_scale_pairs(blueprint: Blueprint, layer: int) -> tuple[ScalePair, ...]:
    """The pairs inside one routed expert, `{expert}` in their paths; none in a dense layer."""
    inside = _gated_pair(
        blueprint, layer, blueprint.expert_sites(layer), Stream.EXPERT_INPUT, Stream.EXPERT_HIDDEN
    )
    return () if inside is None else (inside,)


def value_rotation_pair(blueprint: Blueprint, layer: int) -> ScalePair | None:
    """The pair values -> output projection where a rotation of each head's values passes too, else None.

    A factor passes a gate that multiplies feature by feature, and a norm's weight; a rotation does not.
    """
    if blueprint.config.output_gate or blueprint.config.is_delta(layer):
        return None
    readers = blueprint.streams(layer, Half.ATTENTION).get(Stream.ATTENTION_OUTPUT, ())
    return _value_pair(blueprint, layer, readers) if readers else None


def residual_rotation_refusal(blueprint: Blueprint) -> str | None:
    """Why the residual stream of this model cannot be rotated, None where it can."""
    family = blueprint.family
    if family.attention_output_norm is not None or family.mlp_output_norm is not None:
        return (
            f"family {family.name} norms what each half adds to the residual, and the weight of that norm "
            "lets no rotation through"
        )
    return None


def _attention_pairs(blueprint: Blueprint, layer: int) -> Iterable[ScalePair | None]:
    family, config = blueprint.family, blueprint.config
    streams = blueprint.streams(layer, Half.ATTENTION)
    # Delta-nets and indexers read the normed input with small matrices of their own besides.
    others: tuple[str, ...] = ()
    if config.is_delta(layer) and family.delta is not None:
        others = family.delta.gates
    elif config.indexer is not None and family.indexer is not None:
        others = (family.indexer.weights,)
    yield _norm_pair(
        blueprint,
        Stream.ATTENTION_INPUT,
        streams.get(Stream.ATTENTION_INPUT, ()),
        family.input_norm,
        config.hidden_size,
        others,
    )
    latent = config.latent
    if latent is not None:
        latents = (
            (Stream.QUERY_LATENT, family.query_latent_norm, latent.query_rank),
            (Stream.KEY_VALUE_LATENT, family.key_value_latent_norm, latent.key_value_rank),
        )
        for stream, norm, rank in latents:
            if rank is not None and norm is not None:
                yield _norm_pair(blueprint, stream, streams.get(stream, ()), norm, rank)
    readers = streams.get(Stream.ATTENTION_OUTPUT, ())
    if not readers:
        return
    if config.is_delta(layer):
        yield _delta_output_pair(blueprint, readers)
    else:
        yield _value_pair(blueprint, layer, readers)


def _mlp_pairs(blueprint: Blueprint, layer: int) -> Iterable[ScalePair | None]:
    family, hidden = blueprint.family, blueprint.config.hidden_size
    sites = blueprint.sites(layer, Half.MLP)
    if blueprint.sparse(layer) is None:
        readers = tuple(site for site in sites if site.stream is Stream.MLP_INPUT)
        yield _norm_pair(blueprint, Stream.MLP_INPUT, readers, family.mlp_norm, hidden)
        yield _gated_pair(blueprint, layer, sites, Stream.MLP_INPUT, Stream.MLP_HIDDEN)
        return
    inputs = (Stream.SHARED_INPUT, Stream.EXPERT_INPUT)
    readers = tuple(site for site in (*sites, *blueprint.expert_sites(layer)) if site.stream in inputs)
    others = (family.router,) if family.shared_gate is None else (family.router, family.shared_gate)
    yield _norm_pair(blueprint, Stream.EXPERT_INPUT, readers, family.mlp_norm, hidden, others)
    yield _gated_pair(blueprint, layer, sites, Stream.SHARED_INPUT, Stream.SHARED_HIDDEN)


def _norm_pair(
    blueprint: Blueprint,
    stream: Stream,
    readers: tuple[LinearSite, ...],
    norm: str,
    features: int,
    others: tuple[str, ...] = (),
) -> ScalePair | None:
    if not readers:
        return None
    return ScalePair(stream, readers, NormProducer(norm, blueprint.norm_offset(norm)), features, others)


def _gated_pair(
    blueprint: Blueprint, layer: int, sites: tuple[LinearSite, ...], source: Stream, hidden: Stream
) -> ScalePair | None:
    """up -> down: what leaves `up` is multiplied with the activated gate, so a factor passes through."""
    readers = tuple(site for site in sites if site.stream is hidden)
    inputs = [site for site in sites if site.stream is source]
    if not readers or not inputs:
        return None
    up = inputs[-1]  # the gate comes first, in the same matrix or in one of its own
    size = blueprint.linear_shape(readers[0], layer)[1]
    first = blueprint.linear_shape(up, layer)[0] - size
    return ScalePair(hidden, readers, RowsProducer(up, first, 1, size, size), size)


def _value_pair(blueprint: Blueprint, layer: int, readers: tuple[LinearSite, ...]) -> ScalePair | None:
    """Values -> output projection: attention mixes tokens, and leaves the features of a head apart."""
    config, latent = blueprint.config, blueprint.config.latent
    sites = blueprint.sites(layer, Half.ATTENTION)
    by_name = {site.path.rsplit(".", 1)[-1]: site for site in sites}
    if latent is not None:
        expand = by_name.get("kv_b_proj")
        if expand is None:
            return None
        free, size = latent.position_free_dim, latent.value_dim
        heads = config.num_heads
        producer = RowsProducer(expand, free, heads, size, free + size)
        return ScalePair(Stream.ATTENTION_OUTPUT, readers, producer, heads * size)
    made_by = by_name.get("v_proj") or by_name.get("qkv_proj")
    if made_by is None:
        return None
    size = config.num_kv_heads * config.head_dim
    first = blueprint.linear_shape(made_by, layer)[0] - size  # values come last where one matrix makes all
    copies = config.num_heads // config.num_kv_heads
    tie = None if copies == 1 else SharedFeatures(config.num_kv_heads, copies, config.head_dim)
    producer = RowsProducer(made_by, first, 1, size, size)
    return ScalePair(Stream.ATTENTION_OUTPUT, readers, producer, size, tie=tie)


def _delta_output_pair(blueprint: Blueprint, readers: tuple[LinearSite, ...]) -> ScalePair | None:
    """The norm of a delta-net -> its output projection; all heads share the one norm."""
    names, delta = blueprint.family.delta, blueprint.config.delta
    if names is None or delta is None:
        return None
    tie = None if delta.value_heads == 1 else SharedFeatures(1, delta.value_heads, delta.value_dim)
    return ScalePair(Stream.ATTENTION_OUTPUT, readers, NormProducer(names.norm), delta.value_dim, tie=tie)
