"""A model family as data: which tensors a decoder layer has, and which linears read the same input."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from qwen_quantize.models.config import ConfigRules, ModelConfig
from qwen_quantize.models.moe import MoeConfig
from qwen_quantize.models.shapes import attention_shape


class Half(StrEnum):
    """The two residual halves of a decoder layer."""

    ATTENTION = "attention"
    MLP = "mlp"


class Stream(StrEnum):
    """The activations that linears read. Linears of one stream share their input, and so one Hessian.

    SHARED_*: the expert that every token visits. EXPERT_*: one routed expert, which sees only its tokens.
    """

    ATTENTION_INPUT = "attention_input"
    QUERY_LATENT = "query_latent"
    KEY_VALUE_LATENT = "key_value_latent"
    ATTENTION_OUTPUT = "attention_output"
    MLP_INPUT = "mlp_input"
    MLP_HIDDEN = "mlp_hidden"
    SHARED_INPUT = "shared_input"
    SHARED_HIDDEN = "shared_hidden"
    EXPERT_INPUT = "expert_input"
    EXPERT_HIDDEN = "expert_hidden"


# Their linears add to the residual, so an error of theirs counts relative to the size of the residual.
RESIDUAL_WRITERS = frozenset(
    {Stream.ATTENTION_OUTPUT, Stream.MLP_HIDDEN, Stream.SHARED_HIDDEN, Stream.EXPERT_HIDDEN}
)
_ATTENTION = frozenset(
    {Stream.ATTENTION_INPUT, Stream.QUERY_LATENT, Stream.KEY_VALUE_LATENT, Stream.ATTENTION_OUTPUT}
)
_DENSE = frozenset({Stream.MLP_INPUT, Stream.MLP_HIDDEN})
_HIDDEN = frozenset({Stream.MLP_HIDDEN, Stream.SHARED_HIDDEN, Stream.EXPERT_HIDDEN})


class Bias(StrEnum):
    """Where a linear's bias is decided."""

    NEVER = "never"
    ALWAYS = "always"
    ATTENTION_FLAG = "attention_bias"
    QKV_FLAG = "qkv_bias"
    MLP_FLAG = "mlp_bias"


class When(StrEnum):
    """Where a linear exists: everywhere, by whether queries come from a latent, or by the kind of layer."""

    ALWAYS = "always"
    QUERY_LATENT = "query_latent"
    NO_QUERY_LATENT = "no_query_latent"
    ATTENTION_LAYER = "attention_layer"
    DELTA_LAYER = "delta_layer"


@dataclass(frozen=True, slots=True)
class LinearSite:
    """One linear of a decoder layer. `path` is relative to the layer, e.g. `self_attn.q_proj`.

    A routed expert's path holds `{expert}`, e.g. `mlp.experts.{expert}.gate_proj`.
    """

    path: str
    stream: Stream
    bias: Bias = Bias.NEVER
    when: When = When.ALWAYS


@dataclass(frozen=True, slots=True)
class DeltaNames:
    """The tensors of a gated delta-net layer that are no linears to be quantized.

    gates: the projection to rates and steps, in one [2 * value heads, hidden] or in two, rates first.
    """

    gates: tuple[str, ...]
    decay: str = "linear_attn.A_log"
    step_bias: str = "linear_attn.dt_bias"
    convolution: str = "linear_attn.conv1d.weight"
    norm: str = "linear_attn.norm.weight"


@dataclass(frozen=True, slots=True)
class IndexerNames:
    """The tensors of an indexer that are no linears to be quantized; `weights` projects to one per head."""

    weights: str = "self_attn.indexer.weights_proj.weight"
    key_norm: str = "self_attn.indexer.k_norm.weight"
    key_norm_bias: str = "self_attn.indexer.k_norm.bias"


@dataclass(frozen=True, slots=True)
class Family:
    """One model family: names only; every size comes from the model's own config.

    linears: attention and dense MLP. shared, experts, router, correction_bias, shared_gate: of sparse layers.
    query_latent_norm, key_value_latent_norm: with latent attention. attention_output_norm, mlp_output_norm: of
    what a half adds to the residual. zero_centred_norms: weights of norms are stored as distance from one (not
    those on latents and in delta-nets). scaled_embedding: tokens' vectors are multiplied with sqrt(hidden_size).
    rules: how the family writes its config.
    """

    name: str
    architectures: tuple[str, ...]
    linears: tuple[LinearSite, ...]
    shared: tuple[LinearSite, ...] = ()
    experts: tuple[LinearSite, ...] = ()
    router: str = "mlp.gate.weight"
    correction_bias: str | None = None
    shared_gate: str | None = None
    input_norm: str = "input_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    query_norm: str | None = None
    key_norm: str | None = None
    query_latent_norm: str | None = None
    key_value_latent_norm: str | None = None
    attention_output_norm: str | None = None
    mlp_output_norm: str | None = None
    zero_centred_norms: bool = False
    scaled_embedding: bool = False
    delta: DeltaNames | None = None
    indexer: IndexerNames | None = None
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer_prefix: str = "model.layers.{layer}."
    rules: ConfigRules = field(default_factory=ConfigRules)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A family and the sizes of one model of it.

    A layer's number runs from 0; those from `num_layers` on are the layers for multi-token prediction.
    """

    family: Family
    config: ModelConfig

    @property
    def num_layers(self) -> int:
        """The decoder layers that the forward pass runs."""
        return self.config.num_layers

    @property
    def next_token_layers(self) -> tuple[int, ...]:
        """The layers for multi-token prediction that config.json declares; a checkpoint may leave them out."""
        return tuple(range(self.num_layers, self.num_layers + self.config.next_token_layers))

    def sparse(self, layer: int) -> MoeConfig | None:
        """The mixture of experts of a layer, or None for a dense MLP."""
        moe = self.config.moe
        return moe if moe is not None and moe.sparse_layers[layer] else None

    def num_experts(self, layer: int) -> int:
        """Routed experts of a layer; 0 for a dense MLP."""
        moe = self.sparse(layer)
        return 0 if moe is None else moe.num_experts

    def norm_offset(self, suffix: str) -> float:
        """What the engine adds to a stored tensor of a layer, or to the final norm, before it multiplies with it."""
        family = self.family
        centred = (
            family.input_norm,
            family.mlp_norm,
            family.query_norm,
            family.key_norm,
            family.attention_output_norm,
            family.mlp_output_norm,
            family.final_norm,
        )
        return 1.0 if family.zero_centred_norms and suffix in centred else 0.0

    @property
    def embedding_scale(self) -> float:
        """What a token's vector is multiplied with before the first layer."""
        return self.config.hidden_size**0.5 if self.family.scaled_embedding else 1.0

    def layer_name(self, layer: int, suffix: str) -> str:
        """The full name of a layer's tensor or module."""
        return self.family.layer_prefix.format(layer=layer) + suffix

    def module_name(self, layer: int, site: LinearSite, expert: int | None = None) -> str:
        """The full name of a linear, without `.weight`; a routed expert's needs its number."""
        if expert is None:
            return self.layer_name(layer, site.path)
        return self.layer_name(layer, site.path.replace("{expert}", str(expert)))

    def sites(self, layer: int, half: Half) -> tuple[LinearSite, ...]:
        """The linears of half a layer in the order in which it runs them, without routed experts."""
        family = self.family
        if half is Half.ATTENTION:
            return tuple(
                site for site in family.linears if site.stream in _ATTENTION and self._exists(site, layer)
            )
        moe = self.sparse(layer)
        if moe is None:
            return tuple(site for site in family.linears if site.stream in _DENSE)
        return family.shared if moe.shared_size else ()

    def expert_sites(self, layer: int) -> tuple[LinearSite, ...]:
        """The linears of one routed expert; none in a dense layer."""
        return self.family.experts if self.sparse(layer) is not None else ()

    def streams(self, layer: int, half: Half) -> dict[Stream, tuple[LinearSite, ...]]:
        """Linears of half a layer by the input they share, in order, without routed experts."""
        return _by_stream(self.sites(layer, half))

    def expert_streams(self, layer: int) -> dict[Stream, tuple[LinearSite, ...]]:
        """Linears of one routed expert by the input they share, in order."""
        return _by_stream(self.expert_sites(layer))

    def _exists(self, site: LinearSite, layer: int) -> bool:
        latent = self.config.latent
        queries_from_latent = latent is not None and latent.query_rank is not None
        match site.when:
            case When.ALWAYS:
                return True
            case When.QUERY_LATENT:
                return queries_from_latent
            case When.NO_QUERY_LATENT:
                return not queries_from_latent
            case When.ATTENTION_LAYER:
                return not self.config.is_delta(layer)
            case When.DELTA_LAYER:
                return self.config.is_delta(layer)

    def has_bias(self, site: LinearSite) -> bool:
        match site.bias:
            case Bias.NEVER:
                return False
            case Bias.ALWAYS:
                return True
            case Bias.ATTENTION_FLAG:
                return self.config.attention_bias
            case Bias.QKV_FLAG:
                return self.config.qkv_bias
            case Bias.MLP_FLAG:
                return self.config.mlp_bias

    def linear_shape(self, site: LinearSite, layer: int) -> tuple[int, int]:
        """(out_features, in_features)."""
        hidden, name = self.config.hidden_size, site.path.rsplit(".", 1)[-1]
        if site.stream not in _ATTENTION:
            size = self._mlp_size(site.stream, layer)
            if site.stream in _HIDDEN:
                return hidden, size
            return (2 * size if name == "gate_up_proj" else size), hidden
        shape = attention_shape(name, self.config)
        if shape is None:
            raise ValueError(f"no shape rule for linear {name!r} of family {self.family.name}")
        return shape

    def _mlp_size(self, stream: Stream, layer: int) -> int:
        """The intermediate size of the MLP that a stream belongs to."""
        if stream in _DENSE:
            return self.config.intermediate_size
        moe = self.sparse(layer)
        if moe is None:
            raise ValueError(f"layer {layer} of family {self.family.name} is dense, it has no {stream}")
        return moe.shared_size if stream in (Stream.SHARED_INPUT, Stream.SHARED_HIDDEN) else moe.expert_size

    def layer_tensors(self, layer: int, half: Half | None = None) -> dict[str, tuple[int, ...]]:
        """Suffix -> shape of the tensors of a layer, or of half of it, that are not linears."""
        tensors: dict[str, tuple[int, ...]] = {}
        if half is not Half.MLP:
            tensors.update(self._attention_tensors(layer))
        if half is not Half.ATTENTION:
            tensors.update(self._mlp_tensors(layer))
        return tensors

    def _attention_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        family, config, latent = self.family, self.config, self.config.latent
        tensors: dict[str, tuple[int, ...]] = {family.input_norm: (config.hidden_size,)}
        if family.attention_output_norm is not None:
            tensors[family.attention_output_norm] = (config.hidden_size,)
        if config.is_delta(layer):
            tensors.update(self._delta_tensors())
            return tensors
        for name in (family.query_norm, family.key_norm):
            if name is not None:
                tensors[name] = (config.head_dim,)
        if latent is not None:
            if latent.query_rank is not None and family.query_latent_norm is not None:
                tensors[family.query_latent_norm] = (latent.query_rank,)
            if family.key_value_latent_norm is not None:
                tensors[family.key_value_latent_norm] = (latent.key_value_rank,)
        if family.indexer is not None and config.indexer is not None:
            tensors[family.indexer.weights] = (config.indexer.heads, config.hidden_size)
            tensors[family.indexer.key_norm] = (config.indexer.head_dim,)
            tensors[family.indexer.key_norm_bias] = (config.indexer.head_dim,)
        return tensors

    def _delta_tensors(self) -> dict[str, tuple[int, ...]]:
        names, delta = self.family.delta, self.config.delta
        if names is None or delta is None:
            raise ValueError(f"family {self.family.name} has no delta-net layers")
        rows = 2 * delta.value_heads // len(names.gates)
        return {
            names.decay: (delta.value_heads,),
            names.step_bias: (delta.value_heads,),
            names.convolution: (delta.mixed_size, 1, delta.taps),
            names.norm: (delta.value_dim,),
            **dict.fromkeys(names.gates, (rows, self.config.hidden_size)),
        }

    def _mlp_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        family, config, moe = self.family, self.config, self.sparse(layer)
        tensors: dict[str, tuple[int, ...]] = {family.mlp_norm: (config.hidden_size,)}
        if family.mlp_output_norm is not None:
            tensors[family.mlp_output_norm] = (config.hidden_size,)
        if moe is not None:
            tensors[family.router] = (moe.num_experts, config.hidden_size)
            if family.correction_bias is not None:
                tensors[family.correction_bias] = (moe.num_experts,)
            if family.shared_gate is not None:
                tensors[family.shared_gate] = (1, config.hidden_size)
        return tensors

    def linear_modules(self) -> dict[str, tuple[int, int]]:
        """Every linear of every decoder layer -> (out_features, in_features).

        In writing order: attention, dense MLP or shared expert, then the routed experts one by one.
        """
        return self._modules(range(self.num_layers))

    def next_token_modules(self) -> dict[str, tuple[int, int]]:
        """As `linear_modules`, of the layers for multi-token prediction; their own projections are not in it."""
        return self._modules(self.next_token_layers)

    def _modules(self, layers: range | tuple[int, ...]) -> dict[str, tuple[int, int]]:
        modules: dict[str, tuple[int, int]] = {}
        for layer in layers:
            for half in Half:
                for site in self.sites(layer, half):
                    modules[self.module_name(layer, site)] = self.linear_shape(site, layer)
            prefix = self.layer_name(layer, "")
            expert_sites = [
                (prefix + site.path, self.linear_shape(site, layer)) for site in self.expert_sites(layer)
            ]
            for expert in map(str, range(self.num_experts(layer))):
                for path, shape in expert_sites:
                    modules[path.replace("{expert}", expert)] = shape
        return modules

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a complete checkpoint of this model holds, with its shape.

        Layers for multi-token prediction are not in it: many checkpoints come without them.
        """
        family, config = self.family, self.config
        tensors: dict[str, tuple[int, ...]] = {family.embedding: (config.vocab_size, config.hidden_size)}
        for layer in range(self.num_layers):
            for suffix, shape in self.layer_tensors(layer).items():
                tensors[self.layer_name(layer, suffix)] = shape
            for half in Half:
                for site in self.sites(layer, half):
                    if self.has_bias(site):
                        name = self.module_name(layer, site) + ".bias"
                        tensors[name] = self.linear_shape(site, layer)[:1]
        for module, shape in self.linear_modules().items():
            tensors[module + ".weight"] = shape
        tensors[family.final_norm] = (config.hidden_size,)
        if not config.tie_word_embeddings:
            tensors[family.head] = (config.vocab_size, config.hidden_size)
        return tensors


def _by_stream(sites: tuple[LinearSite, ...]) -> dict[Stream, tuple[LinearSite, ...]]:
    grouped: dict[Stream, tuple[LinearSite, ...]] = {}
    for site in sites:
        grouped[site.stream] = (*grouped.get(site.stream, ()), site)
    return grouped
