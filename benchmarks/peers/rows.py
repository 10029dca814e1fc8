"""The rows of the comparison: which tool, which of its methods, and what enters the linears when it is measured."""

from __future__ import annotations

from dataclasses import dataclass

OURS = "qwen_quantize"
GROUP = 64  # SmolLM2's 576 columns are no multiple of 128


@dataclass(frozen=True, slots=True)
class Task:
    """Rows of one task compete. cast: of activations, a key of evaluation.CASTS."""

    name: str
    cast: str
    four_bit: bool = False
    asymmetric: bool = False


SYMMETRIC = Task("w4a16 g64 symmetric", "none", four_bit=True)
ASYMMETRIC = Task("w4a16 g64 asymmetric", "none", four_bit=True, asymmetric=True)
W8A8 = Task("w8a8", "int8-token")
FP8 = Task("fp8", "e4m3-token")
MXFP4 = Task("mxfp4", "mxfp4")
MXFP8 = Task("mxfp8", "mxfp8")
TASKS = (SYMMETRIC, ASYMMETRIC, W8A8, FP8, MXFP4, MXFP8)


@dataclass(frozen=True, slots=True)
class Row:
    """One run. tool: OURS, or the name of an environment; method: as its script or our command line has it.

    calibrated: it reads the calibration text. slow: it runs only when asked for, for it takes many minutes or hours.
    """

    task: Task
    tool: str
    method: str
    calibrated: bool
    arguments: tuple[str, ...] = ()
    slow: bool = False

    @property
    def name(self) -> str:
        return f"{self.task.name}, {self.tool} {self.method}"

    @property
    def folder(self) -> str:
        return self.name.replace(", ", "--").replace(" ", "-")


def _four_bit(task: Task) -> list[Row]:
    flags = ("--group-size", str(GROUP)) + (("--asymmetric",) if task.asymmetric else ())
    ours = [
        Row(task, OURS, method, method != "rtn", ("--quant-method", method, *flags))
        for method in ("rtn", "gptq", "awq", "awq_v2")
    ]
    high = ("--quant-method", "awq_v2", "--effort", "high", *flags)
    ours.append(Row(task, OURS, "awq_v2 high", True, high, slow=True))
    peers = [
        Row(task, "llmcompressor", "rtn", False, flags),
        Row(task, "llmcompressor", "gptq", True, flags),
        Row(task, "llmcompressor", "awq", True, flags),
        # With zero points its weights are the same whatever the text: plain rounding.
        Row(task, "autoround", "w4a16-0", not task.asymmetric, flags),
        Row(task, "autoround", "w4a16-neuqi", True, flags),
        Row(task, "autoround", "w4a16-awq", True, flags),
        Row(task, "autoround", "w4a16-awqclip", True, flags, slow=True),
        Row(task, "autoround", "w4a16-50", True, flags, slow=True),
        Row(task, "autoround", "w4a16-200", True, flags, slow=True),
        Row(task, "gptqmodel", "gptq", True, flags),
        Row(task, "torchao", "rtn", False, flags),
    ]
    if task.asymmetric:
        peers.append(Row(task, "hqq", "rtn", False, flags))
    return ours + peers


def _low_precision(task: Task, *peers: Row) -> list[Row]:
    ours = [
        Row(task, OURS, "rtn", False, ("--quant-method", "rtn", "--scheme", task.name)),
        Row(task, OURS, task.name, True, ("--quant-method", task.name)),
    ]
    return [*ours, *peers]


ROWS: tuple[Row, ...] = (
    *_four_bit(SYMMETRIC),
    *_four_bit(ASYMMETRIC),
    *_low_precision(
        W8A8,
        Row(W8A8, "llmcompressor", "smoothquant", True),
        Row(W8A8, "llmcompressor", "smoothquant_gptq", True),
        Row(W8A8, "autoround", "w8a8-0", True),
        Row(W8A8, "torchao", "w8a8", False),
    ),
    *_low_precision(FP8, Row(FP8, "llmcompressor", "fp8", False), Row(FP8, "torchao", "fp8", False)),
    *_low_precision(
        MXFP4, Row(MXFP4, "llmcompressor", "mxfp4", False), Row(MXFP4, "autoround", "mxfp4-0", True)
    ),
    *_low_precision(
        MXFP8, Row(MXFP8, "llmcompressor", "mxfp8", False), Row(MXFP8, "autoround", "mxfp8-0", True)
    ),
)
