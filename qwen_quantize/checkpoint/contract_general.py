"""Rules for every folder: what stands beside the weights, linears that engines fuse, scales of the KV cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from qwen_quantize.checkpoint.ascend_description import DESCRIPTION_FILE as DESCRIPTION
from qwen_quantize.checkpoint.contract_folder import ModelFolder, shown_json
from qwen_quantize.checkpoint.contract_linear import PLAIN, LayoutCheck, ModuleParts
from qwen_quantize.checkpoint.finding import Finding, Severity, warning
from qwen_quantize.models.fusion import fusion_of, product_of

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_MAX_TOKENIZER_BYTES = 64_000_000
# Added tokens that only chat models have.
_CHAT_TOKENS = (
    "<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<｜User｜>", "[INST]", "<|user|>", "<|assistant|>",
)  # fmt: skip
# A side file of another tool -> the methods beside which it says something true.
_SIDE_CONFIGS = {
    "quantize_config.json": ("gptq", "auto-round"),
    "quant_config.json": ("awq",),
    "hf_quant_config.json": ("modelopt",),
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_KEYS = ("group_size", "bits", "desc_act", "sym", "checkpoint_format")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def check_side_files(folder: ModelFolder, method: str) -> list[Finding]:
    return [*_stale(folder, method), *_tokenizer(folder), *_dtype(folder)]


def _stale(folder: ModelFolder, method: str) -> list[Finding]:
    found = []
    for name, methods in _SIDE_CONFIGS.items():
        if name not in folder.files:
            continue
        if method not in methods:
            found.append(
                Finding(
                    name,
                    "stale-file",
                    f"it describes another quantization than config.json ({method or 'none'}); engines that find "
                    "it first "
                    "build layers for that one",
                    "remove the file",
                )
            )
        elif method == "gptq":
            found += _contradicting(folder, name)
    for name in sorted(folder.files):
        if name.startswith("quant_model_description") and name.endswith(".json") and name != DESCRIPTION:
            found.append(
                Finding(
                    name,
                    "description-name",
                    f"vllm-ascend reads {DESCRIPTION} and no other name; it takes this folder for an unquantized "
                    "model",
                    f"rename it to {DESCRIPTION}"
                    if DESCRIPTION not in folder.files
                    else "remove the old one",
                )
            )
        if name.endswith(_PICKLES) and name != "training_args.bin":
            found.append(
                warning(
                    name,
                    "stale-file",
                    "weights as a pickle lie beside the safetensors; loaders that prefer or fall back to it read "
                    "another "
                    "model, and a pickle can run any code",
                    "remove the file",
                )
            )
    return found


def _contradicting(folder: ModelFolder, name: str) -> list[Finding]:
    settings = folder.config.get("quantization_config")
    beside = folder.json_file(name)
    if beside is None or not isinstance(settings, Mapping):
        return []
    return [
        Finding(
            name,
            "stale-file",
            f"it says {key} {shown_json(beside[key])} and config.json {shown_json(settings[key])}; engines believe "
            "one or the "
            "other",
            "remove the file, or make the two equal",
        )
        for key in _KEYS
        if key in beside and key in settings and beside[key] != settings[key]
    ]


def _tokenizer(folder: ModelFolder) -> list[Finding]:
    names = [name for name in _TOKENIZERS if name in folder.files]
    if not names and not any(name.endswith(".tiktoken") for name in folder.files):
        return [
            warning(
                "tokenizer.json",
                "tokenizer",
                "there is no tokenizer; engines stop when they are asked for text",
                "copy the tokenizer's files from the original model",
            )
        ]
    found = []
    if "generation_config.json" not in folder.files:
        found.append(
            warning(
                "generation_config.json",
                "generation-config",
                "it is not there; engines fall back to their own sampling, and stop at the end-of-text token of "
                "config.json "
                "alone",
                "copy it from the original model",
            )
        )
    else:
        folder.json_file("generation_config.json")
    if "tokenizer.json" in folder.files:
        found += _vocabulary(folder)
    return found


def _vocabulary(folder: ModelFolder) -> list[Finding]:
    tokenizer = folder.json_file("tokenizer.json", _MAX_TOKENIZER_BYTES)
    if tokenizer is None:
        return []
    found = []
    added = [entry for entry in _list(tokenizer.get("added_tokens")) if isinstance(entry, Mapping)]
    ids: list[int] = [entry["id"] for entry in added if type(entry.get("id")) is int]
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, Mapping):
        ids += [number for number in vocabulary.values() if type(number) is int]
    elif isinstance(vocabulary, list):
        ids.append(len(vocabulary) - 1)
    size = folder.config.get("vocab_size")
    if type(size) is int and ids and max(ids) >= size:
        found.append(
            Finding(
                "tokenizer.json",
                "tokenizer",
                f"its largest id is {max(ids)} and the model has {size} tokens; such a token reads past the "
                "embedding",
                "take the tokenizer of this model",
            )
        )
    chat = next((entry["content"] for entry in added if entry.get("content") in _CHAT_TOKENS), None)
    if chat is not None and not _has_template(folder):
        found.append(
            warning(
                "chat_template.jinja",
                "chat-template",
                f"the tokenizer has the chat token {chat!r} and no chat template is there; engines refuse chat "
                "requests or "
                "format them in another way",
                "copy chat_template.jinja, or the template in tokenizer_config.json, from the original model",
            )
        )
    return found


def _has_template(folder: ModelFolder) -> bool:
    if any(name.endswith(".jinja") or name == "chat_template.json" for name in folder.files):
        return True
    if "tokenizer_config.json" not in folder.files:
        return False
    settings = folder.json_file("tokenizer_config.json", _MAX_TOKENIZER_BYTES)
    return settings is not None and bool(settings.get("chat_template"))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dtype(folder: ModelFolder) -> list[Finding]:
    """The dtype that config.json promises against that of the embedding and the norms."""
    stated = folder.config.get("torch_dtype", folder.config.get("dtype"))
    if stated is None:
        return [
            warning(
                "config.json",
                "dtype",
                "it has neither torch_dtype nor dtype; engines then choose float16 or float32 themselves",
                "state the dtype of the tensors that are not quantized",
            )
        ]
    wanted = _DTYPES.get(str(stated).removeprefix("torch."))
    if wanted is None:
        return [
            Finding(
                "config.json",
                "dtype",
                f"its dtype is {shown_json(stated)}, which no engine computes in",
                "state bfloat16, float16 or float32",
            )
        ]
    matrices = [
        stored.info
        for name, stored in folder.tensors.items()
        if name.endswith(("embed_tokens.weight", "norm.weight", "lm_head.weight"))
        and stored.info.dtype in PLAIN
    ]
    if matrices and all(info.dtype != wanted for info in matrices):
        return [
            warning(
                matrices[0].name,
                "dtype",
                f"it and all like it are {matrices[0].dtype} and config.json says {stated}; engines convert them "
                "when they "
                "load, and scales that follow the model's dtype with them",
                "correct the dtype in config.json",
            )
        ]
    return []


def check_fused(linears: Iterable[str], folder: ModelFolder, check: LayoutCheck) -> list[Finding]:
    """Linears that engines run as one product share their form, and are quantized all or none."""
    groups: dict[str, list[str]] = {}
    for module in dict.fromkeys((*linears, *check.linears)):
        fusion = fusion_of(module)
        if fusion is not None:
            groups.setdefault(fusion, []).append(module)
    findings = []
    for members in groups.values():
        found = [check.linears.get(module) for module in members]
        plain = [m for m, one in zip(members, found, strict=True) if one is None and _is_plain(folder, m)]
        quantized = [one for one in found if one is not None]
        if quantized and plain:
            findings.append(
                Finding(
                    plain[0],
                    "fused-ignored",
                    f"it is stored in high precision and {quantized[0].module!r}, with which engines fuse it, is "
                    "quantized; "
                    "vLLM, SGLang and vllm-ascend stop, or give both one scheme",
                    "quantize or keep all linears of the product",
                )
            )
        odd = next((one for one in quantized if one.form != quantized[0].form), None)
        if odd is not None:
            findings.append(
                Finding(
                    odd.module,
                    "fused-scheme",
                    f"it is stored as {odd.form!r} and {quantized[0].module!r}, with which engines fuse it, as "
                    f"{quantized[0].form!r}; one product has one scheme, and they stop or misread one of the two",
                    "quantize all linears of the product alike",
                )
            )
    return findings


def check_tensor_scales(check: LayoutCheck) -> list[Finding]:
    """The scales of whole tensors are equal in linears that one matrix is made of."""
    findings = []
    seen: dict[tuple[str, str], tuple[str, float]] = {}
    for module, linear in check.linears.items():
        product = product_of(module)
        if product is None:
            continue
        for suffix, value in linear.tensor_scales:
            first, other = seen.setdefault((product, suffix), (module, value))
            if value == other:
                continue
            # Where it is all the scale that a weight has, engines make two equal by rounding codes again.
            rounded, of_weight = suffix == "weight_scale", suffix.startswith("weight")
            findings.append(
                Finding(
                    f"{module}.{suffix}",
                    "fused-scale",
                    f"it is {value:g} and that of {first!r}, with which engines fuse it, {other:g}; they keep one "
                    "for both, "
                    + (
                        "the larger, and round the other's codes to it a second time, or stop"
                        if rounded
                        else "and every weight of the other is off by the ratio"
                        if of_weight
                        else "and clip or waste range"
                    ),
                    "quantize the linears of one product with one tensor scale",
                    Severity.ERROR if of_weight and not rounded else Severity.WARNING,
                )
            )
    return findings


def _is_plain(folder: ModelFolder, module: str) -> bool:
    info = folder.info(f"{module}.weight")
    return info is not None and info.dtype in PLAIN


_CACHE = re.compile(r"(.*)\.(k_scale|v_scale)$")


def check_cache_scales(folder: ModelFolder, settings: Mapping[str, Any], check: LayoutCheck) -> list[Finding]:
    """`k_scale` and `v_scale`: positive, in pairs, for all layers or none, and where the config speaks of them."""
    pairs: dict[str, set[str]] = {}
    for name in folder.tensors:
        found = _CACHE.fullmatch(name)
        if found is None:
            continue
        key = found[1].removesuffix(".k_proj").removesuffix(".v_proj").removesuffix(".attn")
        pairs.setdefault(key, set()).add(found[2])
        check.known.add(name)
        ModuleParts(folder, found[1], check).positive(found[2], rule="kv-scale")
    findings = [
        Finding(
            f"{key}.{'v_scale' if 'k_scale' in kinds else 'k_scale'}",
            "kv-scale",
            "the scale of the other half of the KV cache is there without it; engines take 1 for this one",
            "store both",
        )
        for key, kinds in pairs.items()
        if len(kinds) == 1
    ]
    layers = folder.config.get("num_hidden_layers")
    if pairs and type(layers) is int and len(pairs) < layers:
        findings.append(
            warning(
                next(iter(pairs)),
                "kv-scale",
                f"{len(pairs)} of {layers} layers have scales of the KV cache; engines take 1 for the others",
                "store them for every layer",
            )
        )
    if settings.get("kv_cache_scheme") and not pairs:
        findings.append(
            warning(
                "config.json",
                "kv-scale",
                "kv_cache_scheme is set and no k_scale or v_scale is stored; engines cache in FP8 with a scale of 1",
                "store the scales, or set kv_cache_scheme to null",
            )
        )
    return findings
