"""Train the small Qwen3-style language model that ships in the package, with its tokenizer.

    nice python tools/train_embedded.py [--deb FILE] [--output FOLDER] [--threads 2]
    python tools/train_embedded.py --steps 20 --text TRAIN.txt --heldout HELDOUT.txt --output FOLDER

The second form is for a smoke run.

A byte-level BPE tokenizer and a dense model (grouped-query attention, normed queries and keys, SwiGLU, tied
head) are trained on four novels and the greater part of a fifth; the calibration and held-out texts are
never seen. Seeds are fixed: the same texts, library versions and thread count give the same bytes.
Prints one JSON document with sizes and perplexities to stdout.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the root, from which its neighbours are imported

from tools.embedded_texts import EMBEDDED, EmbeddedTextError
from tools.embedded_training import (
    COMMON_FIELDS,
    END_OF_TEXT,
    END_OF_TEXT_ID,
    MAX_POSITIONS,
    ROPE_THETA,
    SEED,
    VOCABULARY,
    folder_bytes,
    measurements,
    optimize,
    options_parser,
    read_texts,
    token_streams,
    write_folder,
)

# What config.json takes over from transformers' config; its other fields are that library's own business.
CONFIG_FIELDS = (*COMMON_FIELDS, "head_dim")
# Qwen2's way to cut text into words, so that the tokenizer class readers pick for `qwen3` is the right one.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
STEPS = 2400


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Train the byte-level BPE: 2048 tokens at most, `<|endoftext|>` first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def model_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        use_cache=False,
        attn_implementation="sdpa",
    )


def train(stream: torch.Tensor, steps: int) -> Qwen3ForCausalLM:
    """Train in float32 from a fixed seed and return the model with its weights rounded to bfloat16 values."""
    torch.manual_seed(SEED)  # transformers initialises from the global generator
    model = Qwen3ForCausalLM(model_config())

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=batch[:, :-1]).logits
        return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    optimize(model, stream, steps, loss_of)
    return model


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """Write the Hugging Face folder; the tied head is left out, as its values are the embedding's."""
    config = model.config.to_dict()
    kept = {name: config[name] for name in CONFIG_FIELDS}
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    del state["lm_head.weight"]
    write_folder(folder, {**kept, "architectures": ["Qwen3ForCausalLM"]}, tokenizer, state)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_parser(__doc__, EMBEDDED / "dense", STEPS).parse_args(arguments)
    torch.set_num_threads(options.threads)
    began = time.monotonic()
    try:
        texts = read_texts(options)
        tokenizer = train_tokenizer(texts.training)
        streams = token_streams(tokenizer, texts)
    except (EmbeddedTextError, OSError) as error:
        print(f"train_embedded: {error}", file=sys.stderr)
        return 2
    model = train(streams.training, options.steps)
    save(options.output, model, tokenizer)
    record = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": folder_bytes(options.output),
        **measurements(lambda ids: model(input_ids=ids).logits, tokenizer, texts, streams, options.steps),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(record, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
