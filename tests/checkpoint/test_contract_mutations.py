"""Each way to spoil a sound folder is found by its rule and named; sound folders give no finding."""

# ruff: noqa: E501
# A case is one line of a table, however long.

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen_quantize.checkpoint.contract import Served, check_folder
from qwen_quantize.checkpoint.finding import Severity
from tests.checkpoint.good_folders import DESCRIPTION, make_good_folders
from tests.checkpoint.spoiling import (
    Act,
    add,
    both,
    codes,
    config,
    cut,
    described,
    description,
    drop,
    fill,
    group,
    index,
    json_file,
    move,
    put,
    quant,
    rename,
    tensors,
    unlink,
    weights_arguments,
    without,
    write,
)

L0 = "model.layers.0."
Q, K, V = (f"{L0}self_attn.{name}_proj" for name in "qkv")
OUT, GATE = f"{L0}self_attn.o_proj", f"{L0}mlp.gate_proj"
EXPERT = f"{L0}mlp.experts.1.up_proj"
STACK = f"{L0}mlp.experts.down_proj"
INDEX, SHARD1, SHARD2 = (
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
)
SINGLE = "model.safetensors"

TILES = {"quant_method": "qwen_quantize-tiles"}

# What the tables say of engines that read the layout, but not this scheme of it; nothing is wrong with the folders.
KNOWN_LIMITS = {
    "mxfp8": [("sglang", "engine-scheme")],
    "mxfp4": [("sglang", "engine-scheme")],
    "ascend-dense4": [("sglang", "engine-scheme"), ("vllm-ascend", "engine-scheme")],
}


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_good_folders(tmp_path_factory.mktemp("good"))


def test_sound_folders_give_no_finding(good: dict[str, Path]) -> None:
    found = {
        name: [(one.engine, one.rule) for one in check_folder(folder).findings]
        for name, folder in good.items()
    }
    assert found == {name: KNOWN_LIMITS.get(name, []) for name in good}


def stale_tensor(folder: Path) -> None:
    shutil.copy(folder / SHARD1, folder / "model-00003-of-00003.safetensors")


def link_outside(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / SHARD1).rename(outside)
    (folder / SHARD1).symlink_to(outside)


def swap_index(found: dict[str, object]) -> None:
    weight_map = found["weight_map"]
    assert isinstance(weight_map, dict)
    name = next(iter(weight_map))
    weight_map[name] = SHARD2


def in_both(folder: Path) -> None:
    (name, value), *_ = load_file(folder / SHARD1).items()
    found = load_file(folder / SHARD2)
    save_file({**found, name: value}, folder / SHARD2)


def widen(name: str) -> Act:
    return put(name, lambda tensor: torch.cat([tensor, tensor[:1]]))


FILES = [
    ("shards", unlink(SHARD2), "shard-missing", SHARD2),
    ("shards", stale_tensor, "shard-unreferenced", "model-00003-of-00003.safetensors"),
    ("shards", cut(SHARD1), "header", SHARD1),
    ("shards", write(SHARD1, "not a header at all"), "header", SHARD1),
    ("shards", link_outside, "header", SHARD1),
    ("shards", index(lambda it: it["weight_map"].update({"ghost.weight": SHARD1})), "index-tensor", "ghost.weight"),
    ("shards", index(swap_index), "index-tensor", "lm_head.weight"),
    ("shards", index(lambda it: it["weight_map"].pop(f"{Q}.weight")), "index-incomplete", f"{Q}.weight"),
    ("shards", index(lambda it: it["metadata"].update(total_size=1)), "index-total", INDEX),
    ("shards", index(lambda it: it["weight_map"].update({f"{Q}.weight": "../evil.safetensors"})), "index-name", "q_proj"),
    ("shards", index(lambda it: it["weight_map"].update({f"{K}.weight": "/etc/passwd"})), "index-name", "k_proj"),
    ("shards", index(lambda it: it.update(weight_map=[])), "index-map", INDEX),
    ("shards", write(INDEX, "{"), "json-file", INDEX),
    ("shards", unlink(INDEX), "index-missing", SHARD1),
    ("shards", in_both, "tensor-twice", "lm_head.weight"),
    ("block", move(SINGLE, "weights.safetensors"), "shard-name", "weights.safetensors"),
    ("block", unlink(SINGLE), "weights-missing", SINGLE),
    ("block", write(INDEX, '{"weight_map": {"a.weight": "old-00001.safetensors"}}'), "shard-missing", "old-00001"),
    ("block", write("hf_quant_config.json", "{}"), "stale-file", "hf_quant_config.json"),
    ("block", write("quantize_config.json", "{}"), "stale-file", "quantize_config.json"),
    ("gptq", write("quantize_config.json", '{"bits": 8}'), "stale-file", "quantize_config.json"),
    ("block", write("pytorch_model.bin", ""), "stale-file", "pytorch_model.bin"),
    ("block", unlink("tokenizer.json"), "tokenizer", "tokenizer.json"),
    ("block", unlink("generation_config.json"), "generation-config", "generation_config.json"),
    (
        "block",
        json_file("tokenizer.json", lambda it: it["added_tokens"].append({"id": 1, "content": "<|im_start|>"})),
        "chat-template",
        "chat_template.jinja",
    ),
    ("block", json_file("tokenizer.json", lambda it: it["model"]["vocab"].update(far=9999)), "tokenizer", "tokenizer.json"),
    ("block", json_file("qwen_quantize.json", lambda it: it.update(layout="awq")), "manifest-layout", "qwen_quantize"),
    ("block", json_file("qwen_quantize.json", lambda it: it.update(output_bytes=1)), "manifest-bytes", "qwen_quantize"),
    ("block", json_file("qwen_quantize.json", lambda it: it["layers"][0]["linears"][0].update(name="gone")), "manifest-linear", "gone"),
]  # fmt: skip

MODEL = [
    ("plain", drop(f"{L0}input_layernorm.weight"), "tensor-missing", f"{L0}input_layernorm.weight"),
    ("plain", drop("lm_head.weight"), "head-missing", "lm_head.weight"),
    ("int8", tensors(lambda it: it.update({"lm_head.weight": it["model.embed_tokens.weight"].clone()})), "tied-head", "lm_head.weight"),
    ("plain", put(f"{K}.weight", lambda it: it.t()), "tensor-shape", f"{K}"),
    ("plain", widen("model.norm.weight"), "tensor-shape", "model.norm.weight"),
    ("plain", put("model.norm.weight", lambda it: it.to(torch.int8)), "plain-dtype", "model.norm.weight"),
    ("plain", add(f"{L0}self_attn.extra.weight", torch.ones(4)), "tensor-unknown", "self_attn.extra"),
    ("plain", config(hidden_size=256), "tensor-shape", "model.embed_tokens.weight"),
    ("plain", both(without("layer_types"), config(num_hidden_layers=1)), "layer-count", "model.layers.1."),
    ("plain", both(without("layer_types"), config(num_hidden_layers=3)), "tensor-missing", "model.layers.2."),
    ("plain", config(architectures=None), "config", "config.json"),
    ("plain", config(num_attention_heads="four"), "config", "config.json"),
    ("block", config(dtype="float31"), "dtype", "config.json"),
    ("block", config(dtype="bfloat16"), "dtype", "lm_head.weight"),
    ("block", without("dtype"), "dtype", "config.json"),
    ("latent", config(num_nextn_predict_layers=0), "mtp-undescribed", "model.layers.4."),
    ("latent", tensors(lambda it: [it.pop(n) for n in list(it) if n.startswith("model.layers.4.")]), "mtp-missing", "model.layers.4"),
    ("latent", drop("model.layers.2.mlp.experts.7.up_proj.weight", "model.layers.2.mlp.experts.7.up_proj.weight_scale"), "expert-missing", "experts.7.up_proj"),
    ("pack-experts", tensors(lambda it: [it.pop(n) for n in list(it) if n.startswith(EXPERT + ".")]), "expert-missing", EXPERT),
]  # fmt: skip

BLOCK = [
    ("block", drop(f"{Q}.weight_scale_inv"), "scale-missing", f"{Q}.weight_scale_inv"),
    ("block", widen(f"{Q}.weight_scale_inv"), "scale-shape", f"{Q}.weight_scale_inv"),
    ("block", put(f"{Q}.weight_scale_inv", lambda it: it.to(torch.float8_e8m0fnu)), "scale-dtype", f"{Q}.weight_scale_inv"),
    ("block", fill(f"{Q}.weight_scale_inv", 0.0), "scale-value", f"{Q}.weight_scale_inv"),
    ("block", fill(f"{Q}.weight_scale_inv", float("nan")), "scale-value", f"{Q}.weight_scale_inv"),
    ("block", fill(f"{Q}.weight_scale_inv", float("inf")), "scale-value", f"{Q}.weight_scale_inv"),
    ("block", fill(f"{Q}.weight_scale_inv", -0.5), "scale-value", f"{Q}.weight_scale_inv"),
    ("block", fill(f"{Q}.weight_scale_inv", 0.3), "scale-power", f"{Q}.weight_scale_inv"),
    ("block", codes(f"{Q}.weight", 0x7F), "weight-nan", f"{Q}.weight"),
    ("block", codes(f"{Q}.weight", 0xFF), "weight-nan", f"{Q}.weight"),
    ("block", put(f"{Q}.weight", lambda it: torch.zeros_like(it.view(torch.uint8)).view(it.dtype)), "weight-zero", f"{Q}.weight"),
    ("block", put(f"{Q}.weight", lambda it: it.float().to(torch.float8_e5m2)), "weight-dtype", f"{Q}.weight"),
    ("block", put(f"{Q}.weight", lambda it: it.float()), "scale-orphan", f"{Q}.weight_scale_inv"),
    ("block", tensors(lambda it: it.update({f"{Q}.weight": it[f"{Q}.weight"].float()}) or it.pop(f"{Q}.weight_scale_inv")), "fused-ignored", Q),
    ("block", tensors(lambda it: it.update({f"{OUT}.weight": it[f"{OUT}.weight"].float()}) or it.pop(f"{OUT}.weight_scale_inv")), "ignore-missing", OUT),
    ("block", quant(weight_block_size=[32, 32]), "scale-shape", f"{Q}.weight_scale_inv"),
    ("block", quant(weight_block_size="128"), "config-value", "config.json"),
    ("block", quant(fmt="e5m2"), "config-value", "config.json"),
    ("block", quant(scale_fmt="int8"), "config-value", "config.json"),
    ("block", quant(activation_scheme="static"), "input-scale-missing", f"{Q}.input_scale"),
    ("block", quant(modules_to_not_convert=["lm_head", Q]), "ignore-quantized", Q),
    ("block", quant(modules_to_not_convert=["lm_haed"]), "ignore-unmatched", "lm_haed"),
    ("block", quant(modules_to_not_convert=3), "config-value", "config.json"),
    ("block", quant(quant_method="fp9"), "method-unknown", "config.json"),
    ("block", without("quantization_config"), "config-missing", "weight"),
    ("block", config(quantization_config=7), "config-value", "config.json"),
    ("plain", config(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}), "config-unused", "config.json"),
    ("hif8", drop(f"{Q}.weight_scale"), "scale-missing", f"{Q}.weight_scale"),
    ("hif8", fill(f"{Q}.weight_scale", 0.0), "scale-value", f"{Q}.weight_scale"),
]  # fmt: skip

COMPRESSED = [
    ("pack", drop(f"{Q}.weight_shape"), "weight-shape-missing", f"{Q}.weight_shape"),
    ("pack", put(f"{Q}.weight_shape", lambda it: it + 64), "weight-shape", f"{Q}.weight_shape"),
    ("pack", put(f"{Q}.weight_packed", lambda it: it[:, :-1]), "weight-shape", f"{Q}.weight_shape"),
    ("pack", put(f"{Q}.weight_packed", lambda it: it.to(torch.int64)), "weight-dtype", f"{Q}.weight_packed"),
    ("pack", widen(f"{Q}.weight_scale"), "scale-shape", f"{Q}.weight_scale"),
    ("pack", drop(f"{Q}.weight_scale"), "scale-missing", f"{Q}.weight_scale"),
    ("pack", fill(f"{Q}.weight_scale", 0.0), "scale-value", f"{Q}.weight_scale"),
    ("pack", add(f"{Q}.weight_zero_point", torch.zeros(16, 4, dtype=torch.int32)), "zero-point", f"{Q}.weight_zero_point"),
    ("pack", add(f"{Q}.weight_g_idx", torch.zeros(128, dtype=torch.int32)), "g-idx", f"{Q}.weight_g_idx"),
    ("pack", add(f"{Q}.weight", torch.ones(128, 128)), "weight-twice", f"{Q}.weight"),
    ("pack", weights_arguments(group_size=64), "scale-shape", f"{Q}.weight_scale"),
    ("pack", weights_arguments(group_size=None), "config-value", "config.json"),
    ("pack", weights_arguments(num_bits=8), "weight-shape", f"{Q}.weight_shape"),
    ("pack", weights_arguments(num_bits=9), "config-value", "config.json"),
    ("pack", weights_arguments(type="float"), "config-value", "config.json"),
    ("pack", weights_arguments(strategy="channel"), "scale-shape", f"{Q}.weight_scale"),
    ("pack", weights_arguments(strategy="rows"), "config-value", "config.json"),
    ("pack", weights_arguments(symmetric=False), "zero-point-missing", f"{Q}.weight_zero_point"),
    ("pack", weights_arguments(actorder="group"), "actorder", "config.json"),
    ("pack", both(group(format="int-quantized"), quant(format="int-quantized")), "weight-missing", f"{Q}.weight"),
    ("pack", group(format="marlin-24"), "format-unknown", "config.json"),
    ("pack", group(targets=["re:.*mlp.*"]), "target-missing", Q),
    ("pack", group(targets=[]), "config-value", "config.json"),
    ("pack", quant(quantization_status="frozen"), "config-value", "config.json"),
    ("pack", quant(sparsity_config={"format": "sparse-24-bitmask"}), "config-value", "config.json"),
    ("pack", quant(config_groups={}), "config-value", "config.json"),
    ("pack", quant(ignore=["lm_head", "re:.*k_proj$"]), "ignore-quantized", K),
    ("pack", quant(ignore=["lm_head", "re:.*(a+)+$"]), "config-value", "config.json"),
    ("pack", quant(kv_cache_scheme={"num_bits": 8}), "kv-scale", "config.json"),
    ("pack", add(f"{L0}self_attn.k_scale", torch.ones(1)), "kv-scale", f"{L0}self_attn.v_scale"),
    ("pack", both(*(add(f"model.layers.{n}.self_attn.{one}_scale", torch.full((1,), -1.0 if n else 1.0)) for n in (0, 1) for one in "kv")), "kv-scale", "model.layers.1.self_attn.k_scale"),
    ("pack-zero", put(f"{Q}.weight_zero_point", lambda it: it[:-1]), "zero-point-shape", f"{Q}.weight_zero_point"),
    ("pack-experts", fill(f"{EXPERT}.weight_scale", 0.0), "scale-value", f"{EXPERT}.weight_scale"),
    ("pack-experts", fill(f"{EXPERT}.weight_scale", float("nan")), "scale-value", f"{EXPERT}.weight_scale"),
    ("int8", put(f"{Q}.weight_scale", lambda it: it.to(torch.float64)), "scale-dtype", f"{Q}.weight_scale"),
    ("int8", put(f"{Q}.weight", lambda it: it.to(torch.int32)), "weight-dtype", f"{Q}.weight"),
    ("fp8", rename(f"{Q}.weight_scale", f"{Q}.weight_scale_inv"), "tensor-name", f"{Q}.weight_scale_inv"),
    ("fp8", codes(f"{Q}.weight", 0x7F), "weight-nan", f"{Q}.weight"),
    ("fp8", put(f"{Q}.weight_scale", lambda it: torch.full_like(it, 1e-5).half()), "scale-subnormal", f"{Q}.weight_scale"),
    ("fp8", put(f"{Q}.weight_scale", lambda it: (it * 1e9).half()), "scale-value", f"{Q}.weight_scale"),
    ("mxfp8", codes(f"{Q}.weight_scale", 0xFF), "scale-nan", f"{Q}.weight_scale"),
    ("mxfp8", put(f"{Q}.weight_scale", lambda it: it.float()), "scale-dtype", f"{Q}.weight_scale"),
    ("mxfp8", weights_arguments(scale_dtype=None), "scale-dtype-key", "config.json"),
    ("mxfp4", weights_arguments(group_size=16), "config-value", "config.json"),
    ("nvfp4", drop(f"{Q}.weight_global_scale"), "scale-missing", f"{Q}.weight_global_scale"),
    ("nvfp4", put(f"{K}.weight_global_scale", lambda it: it * 2), "fused-scale", f"{Q}.weight_global_scale"),
    ("nvfp4", fill(f"{OUT}.weight_global_scale", 0.0), "scale-value", f"{OUT}.weight_global_scale"),
    ("nvfp4", group(input_activations={"num_bits": 4, "type": "float", "dynamic": "local", "strategy": "tensor_group", "group_size": 16}), "input-scale-missing", f"{Q}.input_global_scale"),
]  # fmt: skip

WORDS = [
    ("awq", quant(version="gemv"), "awq-version", "config.json"),
    ("awq", quant(bits=8), "config-value", "config.json"),
    ("awq", quant(zero_point=False), "config-value", "config.json"),
    ("awq", quant(group_size=64), "scale-shape", f"{Q}.scales"),
    ("awq", quant(group_size=0), "config-value", "config.json"),
    ("awq", put(f"{Q}.qzeros", lambda it: torch.full_like(it, 0x77777777)), "zero-point", f"{Q}.qzeros"),
    ("awq", drop(f"{Q}.qzeros"), "zero-point-missing", f"{Q}.qzeros"),
    ("awq", drop(f"{Q}.qweight"), "scale-orphan", f"{Q}.qzeros"),
    ("awq", fill(f"{Q}.scales", 0.0), "scale-value", f"{Q}.scales"),
    ("awq", put(f"{Q}.scales", lambda it: it * 1e9), "scale-value", f"{Q}.scales"),
    ("awq", put(f"{Q}.qweight", lambda it: it.to(torch.int64)), "weight-dtype", f"{Q}.qweight"),
    ("awq", quant(modules_to_not_convert=["lm_head", "mlp"]), "ignore-quantized", GATE),
    ("gptq", put(f"{Q}.qzeros", lambda it: torch.full_like(it, 0x88888888 - (1 << 32))), "checkpoint-format", f"{Q}.qzeros"),
    ("gptq", quant(checkpoint_format="gptq_v2"), "checkpoint-format", f"{Q}.qzeros"),
    ("gptq", quant(checkpoint_format="gptq_p"), "checkpoint-format", "config.json"),
    ("gptq", put(f"{Q}.qzeros", lambda it: it + 1), "zero-point", f"{Q}.qzeros"),
    ("gptq", put(f"{Q}.g_idx", lambda it: it.flip(0)), "g-idx", f"{Q}.g_idx"),
    ("gptq", fill(f"{Q}.g_idx", 99), "g-idx", f"{Q}.g_idx"),
    ("gptq", put(f"{Q}.g_idx", torch.zeros_like), "g-idx", f"{Q}.g_idx"),
    ("gptq", put(f"{Q}.g_idx", lambda it: it[:-1]), "g-idx-shape", f"{Q}.g_idx"),
    ("gptq", both(quant(desc_act=True), drop(f"{Q}.g_idx")), "g-idx-missing", f"{Q}.g_idx"),
    ("gptq", quant(bits=8), "zero-point-shape", f"{Q}.qzeros"),
    ("gptq", quant(bits="4"), "config-value", "config.json"),
    ("gptq", quant(dynamic={"-:^model\\.layers\\.9\\.": {}}), "ignore-unmatched", "layers"),
    ("gptq", add(f"{Q}.weight", torch.ones(128, 128)), "weight-twice", f"{Q}.weight"),
]  # fmt: skip

ASCEND = [
    ("ascend", move(DESCRIPTION, "quant_model_description_w8a8_dynamic.json"), "description-name", "w8a8_dynamic"),
    ("ascend", config(quantization_config={"quant_method": "fp8"}), "leftover-config", "config.json"),
    ("ascend", write(INDEX, '{"weight_map": {"a.weight": "model-00001-of-00002.safetensors"}}'), "shard-missing", "model-00001"),
    ("ascend", described(f"{Q}.weight", None), "description-missing", f"{Q}.weight"),
    ("ascend", described(f"{Q}.weight", "W9A9"), "description-type", f"{Q}.weight"),
    ("ascend", described(f"{Q}.weight", "FLOAT"), "description-type", f"{Q}.weight"),
    ("ascend", described(f"{GATE}.weight_scale", "W8A8"), "description-mixed", f"{GATE}.weight_scale"),
    ("ascend", described("model.layers.9.mlp.up_proj.weight", "FLOAT"), "description-stale", "model.layers.9."),
    ("ascend", description(model_quant_type="W4A4_DYNAMIC"), "description-type", DESCRIPTION),
    ("ascend", write(DESCRIPTION, "[]"), "json-file", DESCRIPTION),
    ("ascend", put(f"{Q}.deq_scale", lambda it: it.view(torch.int32).to(torch.int64)), "deq-scale-dtype", f"{Q}.deq_scale"),
    ("ascend", config(dtype="float16"), "deq-scale-dtype", f"{Q}.deq_scale"),
    ("ascend", fill(f"{Q}.deq_scale", 0.0), "scale-value", f"{Q}.deq_scale"),
    ("ascend", put(f"{Q}.quant_bias", lambda it: it.float()), "quant-bias-dtype", f"{Q}.quant_bias"),
    ("ascend", drop(f"{Q}.input_scale"), "input-scale-missing", f"{Q}.input_scale"),
    ("ascend", fill(f"{Q}.input_scale", -1.0), "input-scale-value", f"{Q}.input_scale"),
    ("ascend", fill(f"{Q}.input_offset", 200.0), "offset", f"{Q}.input_offset"),
    ("ascend", fill(f"{GATE}.weight_offset", 1.0), "offset", f"{GATE}.weight_offset"),
    ("ascend", drop(f"{GATE}.weight_offset"), "offset-missing", f"{GATE}.weight_offset"),
    ("ascend", put(f"{GATE}.weight_scale", lambda it: it.reshape(-1)), "scale-shape", f"{GATE}.weight_scale"),
    ("ascend", fill(f"{GATE}.weight_scale", float("inf")), "scale-value", f"{GATE}.weight_scale"),
    ("ascend", put(f"{GATE}.weight", lambda it: it.to(torch.int32)), "weight-dtype", f"{GATE}.weight"),
    ("ascend", description(kv_cache_type="C8"), "kv-type", DESCRIPTION),
    ("ascend", both(add(f"{K}.kv_cache_scale", torch.ones(64)), add(f"{K}.kv_cache_offset", torch.zeros(64)),
                    described(f"{K}.kv_cache_scale", "C8"), described(f"{K}.kv_cache_offset", "C8"),
                    description(kv_cache_type="C8")), "kv-scale", f"{V}.kv_cache_scale"),
    ("ascend-mx", description(group_size=0), "group-size", DESCRIPTION),
    ("ascend-mx", codes(f"{Q}.weight_scale", 0xFF), "scale-nan", f"{Q}.weight_scale"),
    ("ascend-mx", put(f"{Q}.weight_scale", lambda it: it.float()), "scale-dtype", f"{Q}.weight_scale"),
    ("ascend-mx", put(f"{GATE}.weight", lambda it: it[:, :-4]), "group-partial", f"{GATE}.weight"),
    ("mx-oss", drop(f"{STACK}_scales"), "scale-missing", f"{STACK}_scales"),
    ("mx-oss", drop(f"{STACK}_blocks"), "scale-orphan", f"{STACK}_scales"),
    ("mx-oss", put(f"{STACK}_scales", lambda it: it[:, :, :1]), "scale-shape", f"{STACK}_scales"),
    ("mx-oss", fill(f"{STACK}_scales", 255), "scale-nan", f"{STACK}_scales"),
    ("mx-oss", put(f"{STACK}_blocks", lambda it: it.flatten(2)), "weight-shape", f"{STACK}_blocks"),
]  # fmt: skip

CASES = [*FILES, *MODEL, *BLOCK, *COMPRESSED, *WORDS, *ASCEND]


def copy_of(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out)
    return out


@pytest.mark.parametrize(
    ("name", "act", "rule", "named"),
    [pytest.param(*case, id=f"{number}-{case[0]}-{case[2]}") for number, case in enumerate(CASES)],
)
def test_a_spoiled_folder_is_found_out(
    name: str, act: Act, rule: str, named: str, good: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy_of(good[name], tmp_path / "spoiled")
    act(folder)
    findings = check_folder(folder).findings
    matching = [one for one in findings if one.rule == rule and named in one.tensor]
    assert matching, [(one.rule, one.tensor) for one in findings]
    assert all(one.message and one.remedy for one in findings)
    assert not any(
        str(folder) in one.message for one in findings
    )  # a manifest holds no paths of this machine


def test_there_are_enough_of_them() -> None:
    assert len({(case[0], case[2], case[3]) for case in CASES}) >= 100


# Sound folders, and what one engine or a number of devices makes of them.
SERVED = [
    ("block", Served("vllm"), None, ""),
    ("block", Served("sglang"), None, ""),
    ("block", Served("transformers"), None, ""),
    ("block", Served("vllm-ascend"), "engine-scheme", L0),
    ("block", Served("llama.cpp"), "engine-scheme", L0),
    ("block", Served("lmdeploy"), "engine-group", L0),
    ("block", Served("vllm", shards=2), "tp-column", K),
    ("block", Served("vllm", shards=3), "tp-heads", "config.json"),
    ("pack", Served("vllm", shards=2), None, ""),
    ("pack", Served("vllm", shards=8), "tp-heads", "config.json"),
    ("pack-experts", Served("vllm", shards=4), "tp-experts", "experts.0.down_proj"),
    ("pack-experts", Served("vllm-ascend"), "engine-scheme", "self_attn"),
    ("pack", Served("lmdeploy"), None, ""),
    ("pack-zero", Served("vllm"), None, ""),
    ("awq", Served("vllm"), None, ""),
    ("awq", Served("lmdeploy"), None, ""),
    ("awq", Served("vllm-ascend"), "engine-scheme", L0),
    ("gptq", Served("vllm"), None, ""),
    ("gptq", Served("lmdeploy"), "engine-group", L0),
    ("int8", Served("vllm-ascend"), None, ""),
    ("int8", Served("lmdeploy"), "engine-scheme", L0),
    ("fp8", Served("vllm-ascend", chip="ascend-950", family="ascend"), None, ""),
    ("fp8", Served("vllm-ascend", chip="ascend-910b", family="ascend"), "engine-device", L0),
    ("fp8", Served("vllm", chip="ascend-910b", family="ascend"), "engine-device", "ascend"),
    ("mxfp4", Served("vllm"), None, ""),
    ("mxfp4", Served("sglang"), "engine-scheme", L0),
    ("nvfp4", Served("vllm-ascend"), "engine-scheme", L0),
    ("hif8", Served("vllm"), "engine-scheme", L0),
    ("hif8", Served("llama.cpp"), "engine-scheme", L0),
    ("ascend", Served("vllm-ascend"), None, ""),
    ("ascend", Served("vllm"), "engine-scheme", L0),
    ("ascend", Served("sglang", chip="nvidia-h100", family="nvidia"), "engine-device", L0),
    ("ascend-mx", Served("vllm-ascend", chip="ascend-950", family="ascend"), None, ""),
    ("ascend-mx", Served("vllm-ascend", chip="ascend-910b", family="ascend"), "engine-device", L0),
    ("ascend-dense4", Served("vllm-ascend"), "engine-scheme", L0),
    ("mx-oss", Served("vllm"), None, ""),
    ("mx-oss", Served("vllm-ascend"), "engine-scheme", STACK.rpartition(".")[0]),
    ("plain", Served("vllm"), None, ""),
    ("plain", Served("llama.cpp"), "engine-scheme", "plain"),
]


@pytest.mark.parametrize(
    ("name", "served", "rule", "named"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1].engine}-tp{case[1].shards}-{case[1].chip}")
        for case in SERVED
    ],
)
def test_what_an_engine_makes_of_a_sound_folder(
    name: str, served: Served, rule: str | None, named: str, good: dict[str, Path]
) -> None:
    findings = check_folder(good[name], served).findings
    if rule is None:
        assert findings == ()
    else:
        assert [one for one in findings if one.rule == rule and named in one.tensor], findings
        assert all(one.severity is Severity.ERROR for one in findings)


def test_tiles_are_read_by_no_engine(good: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_of(good["int8"], tmp_path / "tiles")
    both(config(quantization_config=TILES), unlink("qwen_quantize.json"))(folder)
    assert check_folder(folder).findings == ()
    assert {one.rule for one in check_folder(folder, Served("vllm-ascend")).findings} == {"engine-scheme"}
    fill(f"{Q}.weight_scale", 0.0)(folder)
    assert [one.rule for one in check_folder(folder).findings] == ["scale-value"]


def test_partial_blocks_are_a_warning_for_transformers_and_stop_a_merged_product(
    good: dict[str, Path], tmp_path: Path
) -> None:
    """k_proj has 64 rows, half a block of 128; the grids of the others are made to fit."""
    folder = copy_of(good["block"], tmp_path / "partial")

    def coarser(found: dict[str, torch.Tensor]) -> None:
        for name in [name for name in found if name.endswith("_inv")]:
            rows, columns = found[name.replace("_scale_inv", "")].shape
            found[name] = torch.ones(-(-rows // 128), -(-columns // 128))

    both(tensors(coarser), quant(weight_block_size=[128, 128]), unlink("qwen_quantize.json"))(folder)
    rules = {(one.engine, one.rule, one.severity.value) for one in check_folder(folder).findings}
    assert rules == {
        ("transformers", "partial-block", "warning"),
        ("vllm", "merged-block", "warning"),
        ("sglang", "merged-block", "warning"),
    }
    assert {(one.rule, one.severity) for one in check_folder(folder, Served("vllm")).findings} == {
        ("merged-block", Severity.ERROR)
    }
