"""Which scheme a request comes to: the method's own, with the group size, zero points and scales that fit the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qwen_quantize.calibrators.methods import Method
from qwen_quantize.checkpoint.stored_linears import LinearReader, StoredKind
from qwen_quantize.errors import UserError
from qwen_quantize.formats.granularity import GranularityKind
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat
from qwen_quantize.formats.tables import BF16, E8M0, FP16, FP32
from qwen_quantize.pipeline.recipe import Recipe
from qwen_quantize.pipeline.selection import Selection

_BLOCK_SIZES = (128, 64, 32)
_HALF_LAYOUTS = ("awq", "gptq", "gguf")  # whose readers compute in FP16 and nothing else
_MODEL_SCALE_LAYOUTS = ("ascend",)  # whose readers hold every scale as they hold activations, in 16 bits
_BLOCKS_OF_32 = ("gguf",)  # whose types have groups of 32 and leave the inputs as they are
_WEIGHTS_ALONE = (*_BLOCKS_OF_32, "mx-oss")  # that leave the inputs of floating-point weights as they are
_MODEL_SCALES: dict[str, Format] = {"BF16": BF16, "F16": FP16, "F32": FP32}


@dataclass(frozen=True, slots=True)
class SchemeChoice:
    """block: (rows, columns) of the weights' regions, 0 columns for the whole row."""

    scheme: Scheme
    block: tuple[int, int]
    notes: tuple[str, ...]


def base_scheme(recipe: Recipe, method: Method) -> Scheme:
    """The scheme that method and request name, before it meets a model; UserError where they do not go together."""
    if recipe.scheme is None:
        scheme = SCHEMES[method.scheme]
    elif recipe.scheme not in SCHEMES:
        raise UserError(f"--scheme {recipe.scheme!r} is not one of the schemes: {', '.join(SCHEMES)}")
    elif recipe.scheme not in (method.scheme, *method.also) and not method.any_scheme:
        own = " and ".join((method.scheme, *method.also))
        raise UserError(
            f"--quant-method {method.name} makes {own} and cannot make {recipe.scheme}; "
            "--quant-method rtn and gptq make every scheme"
        )
    else:
        scheme = SCHEMES[recipe.scheme]
    if scheme.weight.granularity.kind is GranularityKind.BLOCK and method.scheme != scheme.name:
        raise UserError(f"--scheme {scheme.name} has a method of its own: --quant-method {scheme.name}")
    if method.needs_data and not recipe.calibrates:
        raise UserError(
            f"--quant-method {method.name} calibrates on text: give --calibration-dataset, or take --quant-method rtn"
        )
    if scheme.activation is not None and not scheme.dynamic and not recipe.calibrates:
        raise UserError(
            f"--scheme {scheme.name} has one scale for all inputs of a linear, which only text can tell: give "
            "--calibration-dataset"
        )

    if recipe.layout in _WEIGHTS_ALONE and isinstance(scheme.weight.format, FloatFormat):
        return replace(scheme, activation=None, dynamic=False)
    return scheme


def needs_input_amax(scheme: Scheme) -> bool:
    """Whether a scale of the inputs is stored, which only calibration can find."""
    activation = scheme.activation
    return activation is not None and (not scheme.dynamic or activation.tensor_scale_format is not None)


def fit_scheme(
    recipe: Recipe, scheme: Scheme, selection: Selection, linears: LinearReader, dtype: str
) -> SchemeChoice:
    """The scheme for this model. dtype: of its unquantized tensors, a safetensors name."""
    if scheme.weight.granularity.kind is GranularityKind.BLOCK:
        for value, flag in ((recipe.group_size, "--group-size"), (recipe.asymmetric or None, "--asymmetric")):
            if value is not None:
                raise UserError(f"{flag} does not apply to {scheme.name}, whose weights have --block-size")
        block, notes = _choose_block(selection, linears, recipe.block_size)
        return SchemeChoice(scheme.with_block(*block), block, notes)
    if recipe.block_size is not None:
        raise UserError(f"--block-size does not apply to {scheme.name}; --group-size may")
    if recipe.asymmetric:
        if not isinstance(scheme.weight.format, IntFormat) or scheme.activation is not None:
            raise UserError(
                f"--asymmetric is for w4a16: the engines that read {scheme.name} take no zero points"
            )
        scheme = scheme.with_zero_point()
    scheme, notes = _choose_group(recipe.group_size, scheme, selection, recipe.layout)
    if needs_input_amax(scheme) and not recipe.calibrates:
        scheme = replace(scheme, activation=None, dynamic=False)
        notes = (*notes, "activations stay in 16 bits: without text nothing tells their second scale")
    elif (
        scheme.activation is None
        and dtype in _MODEL_SCALES
        and recipe.layout not in _HALF_LAYOUTS
        and scheme.weight.scale_format != E8M0
    ):
        # Engines hold the scales of weights alone as they hold activations.
        scheme = replace(scheme, weight=replace(scheme.weight, scale_format=_MODEL_SCALES[dtype]))
    if recipe.layout in _MODEL_SCALE_LAYOUTS:
        scheme = _with_model_scales(scheme, FP16 if dtype == "F16" else BF16)
    return SchemeChoice(scheme, (1, scheme.weight.granularity.cols), notes)


def _with_model_scales(scheme: Scheme, fmt: Format) -> Scheme:
    """Plain scales in a 16-bit type, before any code is chosen: the engine would round them afterwards."""
    plain = (FP32, BF16, FP16)
    activation = scheme.activation
    if activation is not None and not scheme.dynamic and activation.scale_format in plain:
        activation = replace(activation, scale_format=fmt)
    if scheme.weight.scale_format not in plain:
        return replace(scheme, activation=activation)
    return replace(scheme, weight=replace(scheme.weight, scale_format=fmt), activation=activation)


def _choose_group(
    asked: int | None, scheme: Scheme, selection: Selection, layout: str | None
) -> tuple[Scheme, tuple[str, ...]]:
    """Groups that divide every row: engines have no partial ones."""
    free = isinstance(scheme.weight.format, IntFormat) and (
        scheme.weight.format.bits < 8 or scheme.activation is None
    )
    if layout in _BLOCKS_OF_32 and free:
        if asked not in (None, 32):
            raise UserError(f"layout {layout} has groups of 32 and no others: leave out --group-size {asked}")
        scheme, asked, free = scheme.with_group(32), None, False
    granularity = scheme.weight.granularity
    free = isinstance(scheme.weight.format, IntFormat) and (
        scheme.weight.format.bits < 8 or scheme.activation is None
    )
    if asked is not None and not free:
        raise UserError(f"--group-size does not apply to {scheme.name}: its scales are part of the format")
    if granularity.kind is not GranularityKind.GROUP:
        return scheme, ()
    if asked in (0, -1):
        return scheme.with_group(None), ()
    size = granularity.cols if asked is None else asked
    if size < 1:
        raise UserError(
            f"--group-size must be positive, or 0 for one scale per output channel; found {asked}"
        )
    odd = next((item for item in selection.quantized.items() if item[1][1] % size), None)
    if odd is None:
        return (scheme.with_group(size) if free else scheme), ()
    module, (_, columns) = odd
    if asked is not None or not free:
        raise UserError(
            f"groups of {size} do not divide the {columns} input features of {module!r}, and no engine reads partial "
            + (
                "groups; choose another --group-size"
                if free
                else "ones; --ignore keeps such linears as they are"
            )
        )
    for smaller in _BLOCK_SIZES:
        if all(shape[1] % smaller == 0 for shape in selection.quantized.values()):
            return scheme.with_group(smaller), (
                f"groups of {smaller}: {columns} input features are no multiple of {size}",
            )
    module, (_, columns) = next(item for item in selection.quantized.items() if item[1][1] % 32)
    raise UserError(
        f"no group of 32 divides the {columns} input features of {module!r}; --group-size 0 gives one scale per "
        "output channel"
    )


def _choose_block(
    selection: Selection, linears: LinearReader, asked: int | None
) -> tuple[tuple[int, int], tuple[str, ...]]:
    """The source's own blocks; else blocks of 128, unless some dimension is not a multiple of it.

    Readers disagree about partial blocks: transformers on a CPU derives the block from the grid, so that it
    refuses 576 columns in 5 blocks and misreads 192 rows in 2; vLLM's shards and groups must divide too. The
    576 rows of DeepSeek's kv_a_proj_with_mqa are the exception: their published form has the partial block.
    """
    if asked is not None:
        if asked not in _BLOCK_SIZES:
            raise UserError(f"--block-size must be 32, 64 or 128, found {asked}")
        return (asked, asked), ()
    own = _source_block(selection, linears)
    if own is not None:
        return own, ()
    sizes = {
        module: shape for module, shape in selection.quantized.items() if shape[0] % 128 or shape[1] % 128
    }
    if not sizes:
        return (128, 128), ()
    if all(module.endswith(".kv_a_proj_with_mqa") and not shape[1] % 128 for module, shape in sizes.items()):
        return (128, 128), (
            "the last block of kv_a_proj_with_mqa is partial, as in DeepSeek's own checkpoints, which vLLM and SGLang "
            "read; transformers on a CPU may refuse it",
        )
    odd = min(size for shape in sizes.values() for size in shape if size % 128)
    for size in _BLOCK_SIZES[1:]:
        if all(shape[0] % size == 0 and shape[1] % size == 0 for shape in sizes.values()):
            return (size, size), (
                f"blocks of {size}x{size}: {odd} features are no multiple of 128, and transformers cannot read "
                "partial blocks; --block-size 128 writes them for vLLM and SGLang",
            )
    return (128, 128), (
        "partial blocks: some dimensions are no multiple of 32, so transformers on a CPU will refuse the folder",
    )


def _source_block(selection: Selection, linears: LinearReader) -> tuple[int, int] | None:
    """The block of a source that is in block FP8 already: whatever reads it reads the result."""
    for module in selection.quantized:
        if linears.is_quantized(module):
            stored = linears.describe(module)
            if stored.kind is StoredKind.BLOCK_FP8 and stored.block in [
                (size, size) for size in _BLOCK_SIZES
            ]:
                return stored.block
            return None
    return None
