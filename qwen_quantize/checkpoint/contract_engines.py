"""What each serving engine loads, as data: kinds of linears, group sizes, and where it says no.

The versions are those whose source the table was made from. A kind that is in no entry of an engine is one whose
loader was not found there; that is said, and not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qwen_quantize.checkpoint.contract_ascend import TYPES


@dataclass(frozen=True, slots=True)
class Reads:
    """How an engine takes a kind of linear.

    experts_only: only in a mixture of experts; groups: sizes it has kernels for, 0 for a whole row, empty for any;
    symmetric: only without zero points; chips: families or chips that run it, empty for all of the engine's.
    """

    experts_only: bool = False
    groups: tuple[int, ...] = ()
    symmetric: bool = False
    chips: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """tested: what was read; families: of chips that it runs on, by profile; refuses: kind -> what it does instead.

    fused_blocks: whether blocks of FP8 may not reach across linears that it runs as one product.
    """

    name: str
    tested: str
    families: tuple[str, ...]
    reads: Mapping[str, Reads]
    refuses: Mapping[str, str] = field(default_factory=dict)
    fused_blocks: bool = False
    block_sizes: tuple[tuple[int, int], ...] = ()


_ANY = Reads()
_MARLIN = (0, 32, 64, 128)
_NOT_GGUF = "vLLM's own GGUF loader was removed in 0.24; the package vllm-gguf-plugin brings it back"
_FP8_ASCEND = (
    "vllm-ascend raises NotImplementedError for quant_method fp8 on all chips, DeepSeek-V4 on A5 apart"
)
_WORDS_ASCEND = "vllm-ascend registers no method for AWQ and GPTQ"
_NO_CT_ASCEND = "vllm-ascend's compressed-tensors has no block FP8, NVFP4 or MX"
_ONLY_GGUF = "llama.cpp reads GGUF files only"
_A5 = ("ascend-950",)
_COMPRESSED = (
    "pack4", "pack8", "int8", "int4-bytes", "fp8-channel", "fp8-tensor", "ct-block-fp8", "mxfp8", "mxfp6", "mxfp4",
    "nvfp4",
)  # fmt: skip
_ASCEND_ONLY = "only vllm-ascend and SGLang on Ascend read quant_model_description.json"


def _refusing(kinds: tuple[str, ...], why: str) -> dict[str, str]:
    return dict.fromkeys(kinds, why)


_ALL_ASCEND = tuple(f"ascend {kind}" for kind in TYPES)
_GPUS = (
    "nvidia",
    "amd",
    "moorethreads",
    "metax",
    "hygon",
    "iluvatar",
    "enflame",
    "biren",
    "kunlunxin",
    "cpu",
)

# What no engine reads: our own intermediate forms.
REFUSED_BY_ALL = {
    "tiles": "no engine reads a chip's tiles from a file; vllm-ascend tiles row-major weights when it loads",
    "mx-oss-other": "experts in this form are loaded for gpt-oss alone, and this is another model",
}

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "vllm",
            "0.33.0",
            _GPUS,
            {
                "block-fp8": _ANY,
                "fp8-tensor": _ANY,
                "fp8-channel": _ANY,
                "ct-block-fp8": _ANY,
                "int8": _ANY,
                "pack4": Reads(groups=_MARLIN),
                "pack8": Reads(groups=_MARLIN, symmetric=True),
                "int4-bytes": Reads(chips=("cpu",)),
                "nvfp4": _ANY,
                "mxfp4": _ANY,
                "mxfp8": _ANY,
                "mx-oss": _ANY,
                "awq": Reads(groups=_MARLIN),
                "gptq4": Reads(groups=_MARLIN, symmetric=True),
                "gptq8": Reads(groups=_MARLIN, symmetric=True),
            },
            {
                **_refusing(_ALL_ASCEND, _ASCEND_ONLY),
                "gptq2": "vLLM's GPTQ takes 4 and 8 bits only",
                "gptq3": "vLLM's GPTQ takes 4 and 8 bits only",
                "gguf": _NOT_GGUF,
                "hif8": "vLLM has no HiFloat8",
            },
            fused_blocks=True,
        ),
        Engine(
            "sglang",
            "0.5.23",
            ("nvidia", "amd", "moorethreads", "ascend", "cpu"),
            {
                "block-fp8": Reads(chips=("nvidia", "amd", "moorethreads", "cpu", "ascend-950")),
                "fp8-tensor": _ANY,
                "fp8-channel": _ANY,
                "ct-block-fp8": _ANY,
                "int8": _ANY,
                "pack4": Reads(groups=_MARLIN),
                "pack8": Reads(groups=_MARLIN, symmetric=True),
                "int4-bytes": Reads(experts_only=True),
                "nvfp4": Reads(chips=("nvidia", "amd")),
                "mxfp4": Reads(experts_only=True),
                "mx-oss": Reads(chips=("nvidia", "amd", "cpu")),
                "awq": _ANY,
                "gptq4": _ANY,
                "gptq8": _ANY,
                "gguf": _ANY,
                **{
                    f"ascend {kind}": Reads(chips=("ascend",))
                    for kind in ("W8A8", "W8A8_DYNAMIC", "W4A4_DYNAMIC")
                },
                **{f"ascend {kind}": Reads(chips=_A5) for kind in ("W8A8_MXFP8", "W4A8_MXFP", "W4A4_MXFP4")},
                "ascend W4A8_DYNAMIC": Reads(experts_only=True, chips=("ascend",)),
            },
            {
                "mxfp8": "SGLang has no MXFP8 through compressed-tensors (its own is quant_method mxfp8)",
                "hif8": "SGLang has no HiFloat8",
            },
            fused_blocks=True,
        ),
        Engine(
            "transformers",
            "5.24.0 with compressed-tensors 0.20.1",
            (),
            {
                "block-fp8": _ANY,
                **dict.fromkeys(_COMPRESSED, _ANY),
                "mx-oss": _ANY,
                "awq": _ANY,
                "gptq4": _ANY,
                "gptq8": _ANY,
                "gptq2": _ANY,
                "gptq3": _ANY,
                "gguf": _ANY,
            },
            {**_refusing(_ALL_ASCEND, _ASCEND_ONLY), "hif8": "transformers has no HiFloat8"},
        ),
        Engine(
            "vllm-ascend",
            "main of 2026-08-22",
            ("ascend",),
            {
                **{
                    f"ascend {kind}": _ANY
                    for kind in (
                        "W8A8",
                        "W8A8_DYNAMIC",
                        "W8A8_MIX",
                        "W8A16",
                        "W4A4_DYNAMIC",
                        "W4A4_FLATQUANT_DYNAMIC",
                    )
                },
                **{f"ascend {kind}": Reads(chips=_A5) for kind in ("W8A8_MXFP8", "W4A8_MXFP", "W4A4_MXFP4")},
                "ascend W4A8_DYNAMIC": Reads(experts_only=True),
                "int8": Reads(symmetric=True),
                "fp8-channel": Reads(chips=_A5),
                "int4-bytes": Reads(experts_only=True, groups=(0,)),
                "pack4": Reads(experts_only=True, symmetric=True),
            },
            {
                "block-fp8": _FP8_ASCEND,
                "fp8-tensor": _FP8_ASCEND,
                "awq": _WORDS_ASCEND,
                **_refusing(("gptq2", "gptq3", "gptq4", "gptq8"), _WORDS_ASCEND),
                **_refusing(("ct-block-fp8", "nvfp4", "mxfp4", "mxfp6", "mxfp8", "pack8"), _NO_CT_ASCEND),
                "ascend W4A16": "vllm-ascend registers W4A16 for compressed-tensors' experts only",
                "ascend WFP8AFP8_DYNAMIC": "vllm-ascend registers the name W8A8FP8_DYNAMIC, not this one",
                "gguf": "vllm-ascend has no GGUF loader",
                "hif8": "vllm-ascend has no HiFloat8",
                "mx-oss": "vllm-ascend takes MXFP4 experts through quant_model_description.json, not in this layout",
            },
        ),
        Engine(
            "llama.cpp",
            "with gguf 0.19.0",
            (),
            {"gguf": _ANY},
            {
                **_refusing(_COMPRESSED, _ONLY_GGUF),
                **_refusing(_ALL_ASCEND, _ONLY_GGUF),
                **_refusing(
                    ("block-fp8", "awq", "gptq2", "gptq3", "gptq4", "gptq8", "mx-oss", "hif8"), _ONLY_GGUF
                ),
                "plain": _ONLY_GGUF,
            },
        ),
        Engine(
            "lmdeploy",
            "TurboMind of main, 2026-08",
            ("nvidia",),
            {
                "block-fp8": _ANY,
                "awq": Reads(groups=(128,)),
                "gptq4": Reads(groups=(128,), symmetric=True),
                "pack4": Reads(groups=(32, 128)),
                "mx-oss": _ANY,
            },
            {
                **_refusing(
                    (
                        "int8",
                        "int4-bytes",
                        "fp8-channel",
                        "fp8-tensor",
                        "ct-block-fp8",
                        "mxfp8",
                        "mxfp6",
                        "mxfp4",
                        "nvfp4",
                    ),
                    "TurboMind takes compressed-tensors of format pack-quantized only",
                ),
                "pack8": "TurboMind's pack-quantized is 4-bit only",
                **_refusing(_ALL_ASCEND, _ASCEND_ONLY),
                "hif8": "TurboMind stops at a quant_method that it does not know",
            },
            block_sizes=((128, 128),),
        ),
    )
}
