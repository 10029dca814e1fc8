"""A model family as data: which tensors a decoder layer has, and which linears read the same input."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from qwen_quantize.models.config import ModelConfig


class Stream(StrEnum):
    """The activations that linears read. Linears of one stream share their input, and so one Hessian."""

    ATTENTION_INPUT = "attention_input"
    ATTENTION_OUTPUT = "attention_output"
    MLP_INPUT = "mlp_input"
    MLP_HIDDEN = "mlp_hidden"


# Their linears add to the residual, so an error of theirs counts relative to the size of the residual.
RESIDUAL_WRITERS = frozenset({Stream.ATTENTION_OUTPUT, Stream.MLP_HIDDEN})


class Bias(StrEnum):
    """Where a linear's bias is decided."""

    NEVER = "never"
    ALWAYS = "always"
    ATTENTION_FLAG = "attention_bias"
    MLP_FLAG = "mlp_bias"


@dataclass(frozen=True, slots=True)
class LinearSite:
    """One linear of a decoder layer. `path` is relative to the layer, e.g. `self_attn.q_proj`."""

    path: str
    stream: Stream
    bias: Bias = Bias.NEVER


@dataclass(frozen=True, slots=True)
class Family:
    """One model family: names only; every size comes from the model's own config."""

    name: str
    architectures: tuple[str, ...]
    linears: tuple[LinearSite, ...]
    input_norm: str = "input_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    query_norm: str | None = None
    key_norm: str | None = None
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer_prefix: str = "model.layers.{layer}."


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A family and the sizes of one model of it."""

    family: Family
    config: ModelConfig

    def layer_name(self, layer: int, suffix: str) -> str:
        """The full name of a layer's tensor or module."""
        return self.family.layer_prefix.format(layer=layer) + suffix

    def has_bias(self, site: LinearSite) -> bool:
        match site.bias:
            case Bias.NEVER:
                return False
            case Bias.ALWAYS:
                return True
            case Bias.ATTENTION_FLAG:
                return self.config.attention_bias
            case Bias.MLP_FLAG:
                return self.config.mlp_bias

    def linear_shape(self, site: LinearSite) -> tuple[int, int]:
        """(out_features, in_features)."""
        config = self.config
        heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        match site.path.rsplit(".", 1)[-1]:
            case "q_proj":
                return heads, config.hidden_size
            case "k_proj" | "v_proj":
                return kv, config.hidden_size
            case "o_proj":
                return config.hidden_size, heads
            case "gate_proj" | "up_proj":
                return config.intermediate_size, config.hidden_size
            case "down_proj":
                return config.hidden_size, config.intermediate_size
            case other:
                raise ValueError(f"no shape rule for linear {other!r} of family {self.family.name}")

    def streams(self) -> dict[Stream, tuple[LinearSite, ...]]:
        """Linears by the input they share, in the order in which a layer runs them."""
        grouped: dict[Stream, tuple[LinearSite, ...]] = {}
        for site in self.family.linears:
            grouped[site.stream] = (*grouped.get(site.stream, ()), site)
        return grouped

    def layer_norms(self) -> dict[str, tuple[int, ...]]:
        """Suffix -> shape of the tensors of a layer that are not linears."""
        family, config = self.family, self.config
        norms: dict[str, tuple[int, ...]] = {
            family.input_norm: (config.hidden_size,),
            family.mlp_norm: (config.hidden_size,),
        }
        for name in (family.query_norm, family.key_norm):
            if name is not None:
                norms[name] = (config.head_dim,)
        return norms

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a complete checkpoint of this model holds, with its shape."""
        family, config = self.family, self.config
        tensors: dict[str, tuple[int, ...]] = {family.embedding: (config.vocab_size, config.hidden_size)}
        for layer in range(config.num_layers):
            for suffix, shape in self.layer_norms().items():
                tensors[self.layer_name(layer, suffix)] = shape
            for site in family.linears:
                out_features, in_features = self.linear_shape(site)
                tensors[self.layer_name(layer, site.path + ".weight")] = (out_features, in_features)
                if self.has_bias(site):
                    tensors[self.layer_name(layer, site.path + ".bias")] = (out_features,)
        tensors[family.final_norm] = (config.hidden_size,)
        if not config.tie_word_embeddings:
            tensors[family.head] = (config.vocab_size, config.hidden_size)
        return tensors
