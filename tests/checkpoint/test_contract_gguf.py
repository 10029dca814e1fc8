"""GGUF files by hand, one sound and many spoiled: each fault is found by its rule and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from qwen_quantize.checkpoint.contract import Served, check_folder

Values = dict[str, Any]
Tensors = dict[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]]
HIDDEN, WIDE, HEADS, GROUPS, SIZE, TOKENS, BLOCKS = 64, 96, 4, 2, 16, 40, 2
_Q8, _MX, _F32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "MXFP4", "F32"))


def sound_values() -> Values:
    return {
        "general.architecture": "llama",
        "general.file_type": 7,
        "llama.block_count": BLOCKS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": WIDE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": GROUPS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [f"t{number}" for number in range(TOKENS)],
        "tokenizer.ggml.token_type": [1] * TOKENS,
        "tokenizer.ggml.merges": ["t 1", "t 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sound_tensors() -> Tensors:
    random = np.random.default_rng(0)
    shapes = {"token_embd": (TOKENS, HIDDEN), "output": (TOKENS, HIDDEN), "output_norm": (HIDDEN,)}
    for block in range(BLOCKS):
        shapes |= {
            f"blk.{block}.attn_norm": (HIDDEN,),
            f"blk.{block}.attn_q": (HEADS * SIZE, HIDDEN),
            f"blk.{block}.attn_k": (GROUPS * SIZE, HIDDEN),
            f"blk.{block}.attn_v": (GROUPS * SIZE, HIDDEN),
            f"blk.{block}.attn_output": (HIDDEN, HEADS * SIZE),
            f"blk.{block}.ffn_norm": (HIDDEN,),
            f"blk.{block}.ffn_gate": (WIDE, HIDDEN),
            f"blk.{block}.ffn_up": (WIDE, HIDDEN),
            f"blk.{block}.ffn_down": (HIDDEN, WIDE),
        }
    tensors: Tensors = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        kind = _F32 if len(shape) == 1 else _MX if "ffn_up" in name else _Q8
        tensors[f"{name}.weight"] = (gguf.quants.quantize(values, kind), kind)
    return tensors


def write(folder: Path, values: Values, tensors: Tensors) -> Path:
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "model.gguf", values.get("general.architecture", "llama"))
    if "general.architecture" not in values:
        writer.kv_data[0].pop("general.architecture")
    for key, value in values.items():
        if key == "general.architecture":
            continue
        match value:
            case str():
                writer.add_string(key, value)
            case float():
                writer.add_float32(key, value)
            case int():
                writer.add_uint32(key, value)
            case list():
                writer.add_array(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def drop(key: str) -> Callable[[Values, Tensors], object]:
    return lambda values, tensors: (values if key in values else tensors).pop(key)


def put(key: str, value: Any) -> Callable[[Values, Tensors], object]:
    return lambda values, _: values.update({key: value})


def first_bytes(name: str, *new: int) -> Callable[[Values, Tensors], object]:
    def change(_: Values, tensors: Tensors) -> None:
        tensors[name][0].view(np.uint8).reshape(-1)[: len(new)] = new

    return change


def narrower(name: str) -> Callable[[Values, Tensors], object]:
    def change(_: Values, tensors: Tensors) -> None:
        tensors[name] = (tensors[name][0][:-1], tensors[name][1])

    return change


def with_chat_token(values: Values, _: Tensors) -> None:
    values["tokenizer.ggml.tokens"][3] = "<|im_start|>"


def copied(old: str, new: str) -> Callable[[Values, Tensors], object]:
    return lambda _, tensors: tensors.update({new: tensors[old]})


CASES = [
    (drop("general.architecture"), "gguf-metadata", "general.architecture"),
    (put("general.architecture", "lama"), "gguf-metadata", "general.architecture"),
    (drop("general.file_type"), "gguf-metadata", "general.file_type"),
    (drop("llama.block_count"), "gguf-metadata", "llama.block_count"),
    (put("llama.embedding_length", 0), "gguf-metadata", "llama.embedding_length"),
    (drop("llama.attention.layer_norm_rms_epsilon"), "gguf-metadata", "layer_norm_rms_epsilon"),
    (put("llama.block_count", 3), "gguf-tensor-missing", "blk.2.attn_q.weight"),
    (put("llama.block_count", 1), "gguf-tensor-unknown", "blk.1."),
    (put("llama.attention.head_count", 8), "gguf-tensor-shape", "blk.0.attn_k.weight"),
    (put("llama.feed_forward_length", 128), "gguf-tensor-shape", "blk.0.ffn_gate.weight"),
    (drop("blk.1.ffn_down.weight"), "gguf-tensor-missing", "blk.1.ffn_down.weight"),
    (drop("token_embd.weight"), "gguf-tensor-missing", "token_embd.weight"),
    (drop("output_norm.weight"), "gguf-tensor-missing", "output_norm.weight"),
    (copied("blk.0.attn_q.weight", "blk.7.attn_q.weight"), "gguf-tensor-unknown", "blk.7.attn_q.weight"),
    (narrower("blk.0.attn_q.weight"), "gguf-tensor-shape", "blk.0.attn_q.weight"),
    (narrower("token_embd.weight"), "tokenizer", "tokenizer.ggml.tokens"),
    (drop("tokenizer.ggml.model"), "tokenizer", "tokenizer.ggml.tokens"),
    (drop("tokenizer.ggml.tokens"), "tokenizer", "tokenizer.ggml.tokens"),
    (drop("tokenizer.ggml.merges"), "tokenizer", "tokenizer.ggml.merges"),
    (put("tokenizer.ggml.token_type", [1, 1]), "tokenizer", "tokenizer.ggml.token_type"),
    (put("tokenizer.ggml.eos_token_id", 9999), "tokenizer", "eos_token_id"),
    (with_chat_token, "chat-template", "tokenizer.chat_template"),
    (first_bytes("blk.0.attn_q.weight", 0x00, 0x7C), "scale-value", "blk.0.attn_q.weight"),  # FP16 infinity
    (first_bytes("blk.0.attn_q.weight", 0x01, 0x7E), "scale-value", "blk.0.attn_q.weight"),  # FP16 NaN
    (first_bytes("blk.0.ffn_up.weight", 0xFF), "scale-nan", "blk.0.ffn_up.weight"),
    (first_bytes("output_norm.weight", 0, 0, 0xC0, 0x7F), "value", "output_norm.weight"),
]


def test_a_sound_file_gives_no_finding(tmp_path: Path) -> None:
    folder = write(tmp_path / "sound", sound_values(), sound_tensors())
    report = check_folder(folder)
    assert report.findings == ()
    assert report.layout == "gguf"
    assert {engine.name for engine in report.engines} == {"llama.cpp", "transformers", "sglang"}
    assert report.tensors == len(sound_tensors())
    assert check_folder(folder / "model.gguf", Served("transformers")).findings == ()
    assert [one.rule for one in check_folder(folder, Served("vllm")).findings] == ["engine-scheme"]


@pytest.mark.parametrize(
    ("change", "rule", "named"),
    [pytest.param(*case, id=f"{number}-{case[1]}-{case[2]}") for number, case in enumerate(CASES)],
)
def test_a_spoiled_file_is_found_out(
    change: Callable[[Values, Tensors], object], rule: str, named: str, tmp_path: Path
) -> None:
    values, tensors = sound_values(), sound_tensors()
    change(values, tensors)
    findings = check_folder(write(tmp_path / "spoiled", values, tensors)).findings
    assert [one for one in findings if one.rule == rule and named in one.tensor], findings


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_cut_file_is_named(keep: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "cut", sound_values(), sound_tensors())
    file = folder / "model.gguf"
    file.write_bytes(file.read_bytes()[:keep])
    findings = check_folder(folder).findings
    assert [(one.rule, one.tensor) for one in findings] == [("gguf-header", "model.gguf")]
