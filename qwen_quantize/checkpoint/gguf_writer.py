"""A GGUF as a planned file: the header first, then every tensor at its place, in any order.

The header is all that stands before the first tensor that is still to come: keys, vocabulary, tensor records and,
where the model has one, the table of rotary factors, whose values are known at once.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from qwen_quantize.checkpoint.gguf_config import ROPE_FACTORS, gguf_name, llama3_factors
from qwen_quantize.checkpoint.gguf_layout import PLAIN_KINDS, GgufLayout, Kind
from qwen_quantize.checkpoint.gguf_vocabulary import Vocabulary
from qwen_quantize.checkpoint.shards import OutputTensor, ShardPlan
from qwen_quantize.errors import UserError
from qwen_quantize.models.config import ModelConfig
from qwen_quantize.models.lookup import require_blueprint

_ALIGNMENT = gguf.GGUF_DEFAULT_ALIGNMENT
_FILE_TYPES = {
    Kind.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
    Kind.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    Kind.MXFP4: gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
    Kind.F16: gguf.LlamaFileType.MOSTLY_F16,
    Kind.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    Kind.F32: gguf.LlamaFileType.ALL_F32,
}


@dataclass(frozen=True, slots=True)
class GgufOutput:
    """A tensor as it is planned, and its type and shape as GGUF counts them."""

    planned: OutputTensor
    kind: Kind
    shape: tuple[int, ...]


def plain_output(planned: OutputTensor) -> GgufOutput:
    """A tensor that is not quantized."""
    return GgufOutput(planned, PLAIN_KINDS[planned.dtype], planned.shape)


def plan_gguf(
    layout: GgufLayout,
    tensors: Sequence[GgufOutput],
    config: Mapping[str, Any],
    vocabulary: Vocabulary | None,
) -> ShardPlan:
    """The one file of a model, named after the type of most of its weights.

    config: the object of config.json. UserError for what the header cannot say.
    """
    model = require_blueprint(config).config
    main = _main_kind(tensors)
    factors = _rope_factors(model)
    with tempfile.TemporaryDirectory(prefix="qwen_quantize-") as folder:
        path = Path(folder) / "header.gguf"
        writer = gguf.GGUFWriter(path, layout.architecture)
        _add_keys(writer, model, main)
        if vocabulary is None:
            writer.add_tokenizer_model("none")
        else:
            _add_vocabulary(writer, vocabulary)
        if factors is not None:
            writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes, Kind.F32)
        for tensor in tensors:
            name = gguf_name(tensor.planned.name)
            assert name is not None
            # Any dtype but uint8 says that the shape is logical, not one of bytes.
            writer.add_tensor_info(
                name, tensor.shape, np.dtype(np.float32), tensor.planned.nbytes, tensor.kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = path.read_bytes()
    header += bytes(-len(header) % _ALIGNMENT)
    if factors is not None:
        header += _padded(factors.tobytes())
    offsets, position = {}, len(header)
    for tensor in tensors:
        offsets[tensor.planned.name] = position
        position += -(-tensor.planned.nbytes // _ALIGNMENT) * _ALIGNMENT
    return ShardPlan(
        file=f"model-{main.name}.gguf",
        header=header,
        tensors={tensor.planned.name: tensor.planned for tensor in tensors},
        offsets=offsets,
        nbytes=position,
    )


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


def _main_kind(tensors: Sequence[GgufOutput]) -> Kind:
    elements: dict[Kind, int] = {}
    for tensor in tensors:
        # A vocabulary may outweigh all layers and is not what a file is named after.
        if len(tensor.shape) == 2 and tensor.planned.name.startswith("model.layers."):
            elements[tensor.kind] = elements.get(tensor.kind, 0) + math.prod(tensor.shape)
    return max(elements, key=lambda kind: elements[kind]) if elements else Kind.F32


def _add_keys(writer: gguf.GGUFWriter, model: ModelConfig, main: Kind) -> None:
    writer.add_file_type(_FILE_TYPES[main])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(model.num_layers)
    writer.add_context_length(model.max_position)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_vocab_size(model.vocab_size)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope.theta)
    rope = model.rope
    match rope.kind:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope.factor)
        case "yarn":
            usual = 0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
            if (rope.beta_fast, rope.beta_slow, rope.truncate) != (32.0, 1.0, True) or not math.isclose(
                rope.attention_factor, usual
            ):
                raise UserError(
                    "config.json: YaRN with settings of its own (beta_fast, beta_slow, truncate, attention_factor) has "
                    "no place in a GGUF; choose another --layout"
                )
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope.factor)
            writer.add_rope_scaling_orig_ctx_len(rope.original_max_position)
        case "longrope":
            raise UserError("config.json: LongRoPE is not written to a GGUF; choose another --layout")


def _rope_factors(model: ModelConfig) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """Llama 3's divisors of the frequencies, which GGUF has as a tensor; None for other rules."""
    rope = model.rope
    if rope.kind != "llama3":
        return None
    if (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position) != (1.0, 4.0, 8192):
        raise UserError(
            "config.json: Llama 3's rope with other bounds than 1 and 4 or another original length than 8192 cannot be "
            "read back from a GGUF; choose another --layout"
        )
    table = llama3_factors(rope.theta, model.head_dim, rope.factor, rope.original_max_position)
    return np.asarray(table, np.float32)


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pre is not None:
        writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.scores is not None:
        writer.add_token_scores(list(vocabulary.scores))
    if vocabulary.merges:
        writer.add_token_merges(list(vocabulary.merges))
    for add, token in (
        (writer.add_bos_token_id, vocabulary.bos),
        (writer.add_eos_token_id, vocabulary.eos),
        (writer.add_unk_token_id, vocabulary.unknown),
        (writer.add_pad_token_id, vocabulary.padding),
    ):
        if token is not None:
            add(token)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if vocabulary.space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.space_prefix)
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)
