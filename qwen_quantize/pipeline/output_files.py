"""The files of an output by its layout: shards of safetensors, or one GGUF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen_quantize.checkpoint.gguf_layout import GgufLayout
from qwen_quantize.checkpoint.gguf_vocabulary import Vocabulary, read_vocabulary
from qwen_quantize.checkpoint.gguf_writer import GgufOutput, plain_output, plan_gguf
from qwen_quantize.checkpoint.layouts import Layout
from qwen_quantize.checkpoint.mx_oss_layout import MxOssLayout, stack_experts
from qwen_quantize.checkpoint.shards import DEFAULT_SHARD_BYTES, OutputTensor, ShardPlan, plan_shards
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stacked_output import StackedFolder, StackedPart
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.tensor_info import DTYPES
from qwen_quantize.checkpoint.writer import OutputFolder
from qwen_quantize.errors import UserError
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.models.lookup import require_blueprint
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.tensors import Action, TensorPlan


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """Every file with its header and the places of its tensors. parts: of tensors that stand inside others."""

    shards: tuple[ShardPlan, ...]
    parts: Mapping[str, StackedPart]

    def open(self, target: Path, *, resume: bool, overwrite: bool) -> OutputFolder:
        """The folder that they are written into; raises as `OutputFolder` does."""
        if not self.parts:
            return OutputFolder(target, self.shards, resume=resume, overwrite=overwrite)
        return StackedFolder(target, self.shards, self.parts, resume=resume, overwrite=overwrite)


def output_files(plan: Plan, source: CheckpointSource) -> OutputFiles:
    """The files of a run; UserError for what a header cannot say."""
    if isinstance(plan.layout, GgufLayout):
        return OutputFiles(
            (gguf_file(plan.layout, plan.tensors, plan.schemes, plan.selection.quantized, source),), {}
        )
    return safetensors_files(plan.layout, plan.outputs, plan.recipe.max_shard_bytes)


def safetensors_files(
    layout: Layout, outputs: Sequence[OutputTensor], max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> OutputFiles:
    """Shards of safetensors; UserError for linears that do not make a whole stack."""
    parts: Mapping[str, StackedPart] = {}
    if isinstance(layout, MxOssLayout):
        outputs, parts = stack_experts(outputs)
    return OutputFiles(plan_shards(outputs, max_shard_bytes, layout.weights_stem), parts)


def gguf_file(
    layout: GgufLayout,
    tensors: Sequence[TensorPlan],
    schemes: Mapping[str, Scheme],
    shapes: Mapping[str, tuple[int, int]],
    source: CheckpointSource,
) -> ShardPlan:
    """schemes, shapes: of the linears that are quantized, by module."""
    outputs = []
    for tensor in tensors:
        for output in tensor.outputs:
            if tensor.action is Action.QUANTIZE:
                assert tensor.module is not None
                kind = layout.kind_of(schemes[tensor.module])
                outputs.append(GgufOutput(output, kind, shapes[tensor.module]))
            else:
                outputs.append(plain_output(output))
    return plan_gguf(layout, outputs, source.config, _vocabulary(source.side_files(), source))


def _vocabulary(files: Mapping[str, bytes | Path], source: CheckpointSource) -> Vocabulary | None:
    rows = require_blueprint(source.config).config.vocab_size
    try:
        return read_vocabulary(files, source.config, rows)
    except UserError as error:
        raise UserError(f"{source.path}: {error}") from error


def is_reordered(layout: Layout, tensor: TensorPlan) -> bool:
    """Whether a tensor that is kept has its rows in another order in the file."""
    if not isinstance(layout, GgufLayout) or tensor.action is not Action.KEEP:
        return False
    return layout.permuted_heads(tensor.name.rpartition(".")[0]) is not None


def write_reordered(plan: Plan, source: CheckpointSource, folder: OutputFolder) -> None:
    """Write the tensors that `convert_rest` leaves out: it works row by row, and these change their order."""
    linears = LinearReader(source)
    for tensor in plan.tensors:
        if is_reordered(plan.layout, tensor) and not folder.is_written(tensor.outputs[0].name):
            assert isinstance(plan.layout, GgufLayout)
            write_in_order(plan.layout, tensor, linears, folder)


def write_in_order(
    layout: GgufLayout, tensor: TensorPlan, linears: LinearReader, folder: OutputFolder
) -> None:
    """Write one such tensor whole; it is at most as large as the query projection of a layer."""
    (output,) = tensor.outputs
    values = linears.source.read(tensor.name) if tensor.module is None else linears.read(tensor.module)
    dtype = DTYPES[output.dtype].torch
    assert dtype is not None
    module = output.name.rpartition(".")[0]
    folder.write(output.name, layout.stored_rows(module, values.to(dtype)))
