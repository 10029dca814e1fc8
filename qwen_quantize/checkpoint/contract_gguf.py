"""The rules of a GGUF file: what llama.cpp asks for before it computes anything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from qwen_quantize.checkpoint.finding import Finding, warning
from qwen_quantize.checkpoint.gguf_config import ARCHITECTURES
from qwen_quantize.checkpoint.gguf_header import GgufHeader, GgufTensor, Value, read_gguf_header
from qwen_quantize.errors import UserError

_AGAIN = "convert the model again"
_NUMBERS = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
_BLOCK = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip
_ONLY_IN = {"qwen3": ("attn_q_norm", "attn_k_norm")}
_BIASES = {"qwen2": ("attn_q", "attn_k", "attn_v")}
_MOST_BLOCKS = 4096
_CHAT_TOKENS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<｜User｜>")
# Types whose blocks begin with a float16 scale, which must be finite.
_HALF_SCALES = ("Q4_0", "Q8_0")


def check_gguf(path: Path, limit: int | None) -> tuple[list[Finding], int, dict[str, int]]:
    """(findings, tensors, {bytes of weights: read and there}). limit: on the bytes that are read, None for all."""
    try:
        header = read_gguf_header(path)
    except UserError as error:
        text = str(error).replace(f"{path.parent}/", "")
        return [Finding(path.name, "gguf-header", f"{text}; llama.cpp stops at it", _AGAIN)], 0, {}
    findings = [*_metadata(path.name, header), *_tokenizer(path.name, header), *_tensors(header)]
    read = 0
    there = sum(tensor.nbytes for tensor in header.tensors.values())
    share = None if limit is None or there <= limit else limit // max(len(header.tensors), 1)
    with path.open("rb") as file:
        for tensor in header.tensors.values():
            size = tensor.nbytes if share is None else min(tensor.nbytes, share)
            read += size
            findings += _scales(tensor, os.pread(file.fileno(), size, tensor.begin))
    return findings, len(header.tensors), {"read": read, "there": there}


def _missing(name: str, key: str, what: str) -> Finding:
    return Finding(key, "gguf-metadata", f"{name} {what}; llama.cpp refuses the file", _AGAIN)


def _metadata(name: str, header: GgufHeader) -> list[Finding]:
    arch = header.values.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        return [_missing(name, "general.architecture", "does not say which architecture it is")]
    found = []
    if arch not in gguf.MODEL_ARCH_NAMES.values():
        found.append(
            _missing(
                name, "general.architecture", f"names the architecture {arch!r:.60}, which ggml does not know"
            )
        )
    for key in _NUMBERS:
        value = header.values.get(f"{arch}.{key}")
        ok = isinstance(value, int | float | list) and not isinstance(value, bool) and value not in (0, [])
        if not ok and arch in ARCHITECTURES:
            found.append(_missing(name, f"{arch}.{key}", f"has no positive number for {arch}.{key}"))
    if "general.file_type" not in header.values:
        found.append(
            warning(
                "general.file_type",
                "gguf-metadata",
                f"{name} does not say its file type; llama.cpp guesses it and prints the wrong one",
                _AGAIN,
            )
        )
    return found


def _tokenizer(name: str, header: GgufHeader) -> list[Finding]:
    values = header.values
    tokens = values.get("tokenizer.ggml.tokens")
    kind = values.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or not isinstance(tokens, list) or not tokens:
        return [
            Finding(
                "tokenizer.ggml.tokens",
                "tokenizer",
                f"{name} holds no tokenizer; llama.cpp has nowhere else to look and cannot take text",
                "convert again from a folder that has tokenizer.json",
            )
        ]
    found = []
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2 and embedding.shape[0] != len(tokens):
        found.append(
            Finding(
                "tokenizer.ggml.tokens",
                "tokenizer",
                f"it has {len(tokens)} tokens and 'token_embd.weight' {embedding.shape[0]} rows; llama.cpp takes "
                "the first as "
                "the size of the vocabulary and stops at the tensor",
                "pad the list of tokens to the embedding",
            )
        )
    for key in ("token_type", "scores"):
        other = values.get(f"tokenizer.ggml.{key}")
        if isinstance(other, list) and len(other) != len(tokens):
            found.append(
                Finding(
                    f"tokenizer.ggml.{key}",
                    "tokenizer",
                    f"it has {len(other)} entries for {len(tokens)} tokens; llama.cpp reads past its end or stops",
                    _AGAIN,
                )
            )
    if kind == "gpt2" and not isinstance(values.get("tokenizer.ggml.merges"), list):
        found.append(
            Finding(
                "tokenizer.ggml.merges", "tokenizer", "it is not there and a BPE tokenizer needs it", _AGAIN
            )
        )
    for key in ("bos", "eos", "padding", "unknown"):
        number = values.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and not 0 <= number < len(tokens):
            found.append(
                Finding(
                    f"tokenizer.ggml.{key}_token_id",
                    "tokenizer",
                    f"it is {number} and there are {len(tokens)} tokens; llama.cpp ignores it and may never stop",
                    _AGAIN,
                )
            )
    if "tokenizer.chat_template" not in values:
        chat = next((token for token in _CHAT_TOKENS if token in tokens), None)
        if chat is not None:
            found.append(
                warning(
                    "tokenizer.chat_template",
                    "chat-template",
                    f"the tokenizer has the chat token {chat!r} and no chat template is there; llama.cpp formats "
                    "chats as "
                    "ChatML",
                    "convert again from a folder with the template",
                )
            )
    return found


def _number(values: Mapping[str, Value], key: str) -> int | None:
    value = values.get(key)
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _tensors(header: GgufHeader) -> list[Finding]:
    arch = str(header.values.get("general.architecture"))
    if arch not in ARCHITECTURES:
        return []
    blocks = _number(header.values, f"{arch}.block_count")
    if blocks is None or blocks > _MOST_BLOCKS:
        return []
    wanted = ["token_embd.weight", "output_norm.weight"]
    for block in range(blocks):
        wanted += [f"blk.{block}.{part}.weight" for part in (*_BLOCK, *_ONLY_IN.get(arch, ()))]
        wanted += [f"blk.{block}.{part}.bias" for part in _BIASES.get(arch, ())]
    found = [
        Finding(
            name,
            "gguf-tensor-missing",
            f"the architecture {arch} with {blocks} blocks needs it; llama.cpp stops with 'missing tensor'",
            _AGAIN,
        )
        for name in wanted
        if name not in header.tensors
    ]
    beyond = next((n for n in header.tensors if n.startswith("blk.") and _block_of(n) >= blocks), None)
    if beyond is not None:
        found.append(
            Finding(
                beyond,
                "gguf-tensor-unknown",
                f"{arch}.block_count is {blocks} and it belongs to block {_block_of(beyond)}; llama.cpp stops with "
                "'wrong "
                "number of tensors'",
                "correct block_count, or convert again",
            )
        )
    return [*found, *_shapes(header, arch)]


def _block_of(name: str) -> int:
    number = name.split(".")[1] if name.count(".") > 1 else ""
    return int(number) if number.isascii() and number.isdigit() and len(number) < 8 else -1


def _shapes(header: GgufHeader, arch: str) -> list[Finding]:
    values = header.values
    hidden, wide = _number(values, f"{arch}.embedding_length"), _number(values, f"{arch}.feed_forward_length")
    heads = _number(values, f"{arch}.attention.head_count")
    if hidden is None or wide is None or heads is None:
        return []
    groups = _number(values, f"{arch}.attention.head_count_kv") or heads
    size = _number(values, f"{arch}.attention.key_length") or hidden // heads
    rows: dict[str, tuple[int, ...]] = {
        "attn_q": (heads * size, hidden), "attn_k": (groups * size, hidden), "attn_v": (groups * size, hidden),
        "attn_output": (hidden, heads * size), "ffn_gate": (wide, hidden), "ffn_up": (wide, hidden),
        "ffn_down": (hidden, wide), "attn_norm": (hidden,), "ffn_norm": (hidden,),
    }  # fmt: skip
    found = []
    for name, tensor in header.tensors.items():
        parts = name.split(".")
        wanted = (
            rows.get(parts[2]) if len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" else None
        )
        if wanted is not None and tuple(tensor.shape) != wanted:
            found.append(
                Finding(
                    name,
                    "gguf-tensor-shape",
                    f"its shape is {list(tensor.shape)} and the metadata makes it {list(wanted)}; llama.cpp stops "
                    "with "
                    "'wrong shape'",
                    _AGAIN,
                )
            )
    return found


def _scales(tensor: GgufTensor, data: bytes) -> list[Finding]:
    block_bytes = gguf.GGML_QUANT_SIZES[tensor.type][1]
    whole = np.frombuffer(data[: len(data) // block_bytes * block_bytes], np.uint8).reshape(-1, block_bytes)
    kind = tensor.type.name
    if kind in _HALF_SCALES and whole.size:
        scales = whole[:, :2].copy().view(np.float16)
        if not np.isfinite(scales).all():
            return [
                Finding(
                    tensor.name,
                    "scale-value",
                    f"{int((~np.isfinite(scales)).sum())} of its blocks have a scale that is NaN or infinite; FP16 "
                    "overflowed, "
                    "and outputs are NaN",
                    "quantize the tensor again",
                )
            ]
    if kind == "MXFP4" and whole.size and bool((whole[:, 0] == 0xFF).any()):
        return [
            Finding(
                tensor.name,
                "scale-nan",
                "it holds the exponent byte 0xFF, which is NaN; every product with its block is NaN",
                "quantize the tensor again",
            )
        ]
    if kind in ("F16", "BF16", "F32") and data:
        size = 2 if kind != "F32" else 4
        words = np.frombuffer(data[: len(data) // size * size], f"<u{size}")
        mask = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}[kind]
        if bool(((words & mask) == mask).any()):
            return [
                Finding(
                    tensor.name,
                    "value",
                    "it holds NaN or infinity; outputs are NaN",
                    "convert from a sound model",
                )
            ]
    return []
