"""Expected peak memory, in bytes, and the sizes that keep it under a ceiling."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwen_quantize.calibrators.block_fp8 import STRIP_VALUES
from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import Blueprint, Half, Stream
from qwen_quantize.pipeline.recipe import Recipe

BASE = 350_000_000  # the interpreter with torch and this package, measured and rounded up
_PIECES = 400_000_000  # what conversion without data holds at most: a few pieces of tensors in each thread
_BATCH_TOKENS = 4096
HEAD_ROWS = 256  # predictions whose gradient is taken together
# Tokens: of more the intermediate tensors leave the cache, and nothing gets faster. Second moments of a batch are a
# matrix as large as that of all, so that fewer batches are worth their memory there.
_CALIBRATED_TOGETHER, _WITH_MOMENTS = 512, 1024
_RANGE_STEP = 128
# What the first linears of half a layer read, and what its last one reads.
HALF_ENDS = {
    Half.ATTENTION: (Stream.ATTENTION_INPUT, Stream.ATTENTION_OUTPUT),
    Half.MLP: (Stream.MLP_INPUT, Stream.MLP_HIDDEN),
}
_SOLVED = 40  # bytes for each value of a linear that is solved whole, measured and rounded up
_GAINED = 18  # bytes for each weight of the linear whose output gain is fitted: three copies, one prepared
_CACHE_COPIES = 8  # float32 copies of a batch's keys and values while they are packed and read
_PREPARED = 6  # bytes for each weight that a narrow matrix unit reads, beside its float32


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """windows: calibration windows per batch; most_features: the widest range of second moments; peak: bytes.

    halves: how many halves of layers are solved at the same time, each in its own thread.
    """

    windows: int
    most_features: int | None
    peak: int
    halves: int = 1


def last_inputs(blueprint: Blueprint, layer: int, half: Half) -> int | None:
    """How many features the last linear of a half reads.

    None for a half that is not linears of one input and then a last one: latents and experts have more steps.
    """
    streams = blueprint.streams(layer, half)
    if tuple(streams) != HALF_ENDS[half]:
        return None
    return blueprint.linear_shape(streams[HALF_ENDS[half][1]][0], layer)[1]


def states_bytes(blueprint: Blueprint, tokens: int, *, in_turn: bool) -> int:
    """Disk space for what lies between two halves of layers: float32 states, those read and those written.

    in_turn: whether any method takes linears in turn, so that bfloat16 inputs of a half's last linear lie there too.
    """
    each = 2 * 4 * blueprint.config.hidden_size
    if in_turn:
        widths = [last_inputs(blueprint, layer, half) for layer in _kinds(blueprint) for half in Half]
        each += 2 * max((width for width in widths if width is not None), default=0)
    return tokens * each


def moment_ranges(features: int, most: int | None) -> tuple[int, ...]:
    """Sizes of nearly equal ranges of features, none wider than `most`; multiples of 128 but for the last."""
    if most is None or features <= most:
        return (features,)
    parts = -(-features // most)
    size = -(-features // (parts * _RANGE_STEP)) * _RANGE_STEP
    return (*[size] * ((features - 1) // size), features - size * ((features - 1) // size))


def half_memory(
    blueprint: Blueprint,
    layer: int,
    half: Half,
    most_features: int | None,
    *,
    prepared: bool = False,
    crossed: bool = False,
    moments: bool = True,
) -> int:
    """Bytes of half a layer while it is solved: weights, second moments, one factorization, one solution.

    prepared: the quantized weights are also held as a narrow matrix unit reads them. crossed: cross moments are
    gathered beside the second moments. moments: False where no method of the plan asks for either.
    """
    shapes = [blueprint.linear_shape(site, layer) for site in blueprint.sites(layer, half)]
    expert = [blueprint.linear_shape(site, layer) for site in blueprint.expert_sites(layer)]
    if half is Half.ATTENTION:
        expert = []
    each = 4 + (_PREPARED if prepared else 0)
    held = sum(each * rows * columns for rows, columns in (*shapes, *expert))
    groups = [
        *blueprint.streams(layer, half).values(),
        *(blueprint.expert_streams(layer).values() if expert else ()),
    ]
    copied = max(
        (sum(4 * math.prod(blueprint.linear_shape(site, layer)) for site in sites) for sites in groups),
        default=0,
    )
    inputs = [sites[0] for sites in blueprint.streams(layer, half).values()]
    widths = [blueprint.linear_shape(site, layer)[1] for site in inputs]
    if expert:
        # Everyone's statistics, and this expert's at both of its inputs.
        widths = [*widths, expert[0][1], expert[0][1], expert[-1][1], expert[-1][1]]
    each_moment = 16 if crossed else 8
    ranges = [size for width in widths for size in moment_ranges(width, most_features)] if moments else []
    gathered = sum(each_moment * size**2 for size in ranges)
    widest = max(ranges, default=0)
    factors = 3 * 8 * widest**2
    largest = max((rows * columns for rows, columns in (*shapes, *expert)), default=0)
    strips = 6 * 4 * min(largest, STRIP_VALUES) + 2 * largest + (_GAINED * largest if prepared else 0)
    solving = (12 if crossed else 8) * widest**2
    return held + copied + gathered + solving + max(factors, strips)


def validation_memory(
    blueprint: Blueprint, tokens: int, head_batch_bytes: int, *, prepared: bool = False, cached: bool = False
) -> int:
    """Expected peak of comparing two models in lockstep: a layer and a head of each, all states.

    cached: keys and values of the windows that run together are packed and dequantized again.
    """
    config = blueprint.config
    layers = max(
        sum(
            (8 + (_PREPARED if prepared else 0)) * rows * columns
            for rows, columns in _opened(blueprint, layer)
        )
        for layer in _kinds(blueprint)
    )
    heads = (2 * 4 + 2) * config.vocab_size * config.hidden_size
    states = 3 * 4 * tokens * config.hidden_size
    rows = _CACHE_COPIES * 4 * min(tokens, _BATCH_TOKENS) * _cache_width(blueprint) if cached else 0
    return BASE + max(2 * layers + rows, heads + 6 * head_batch_bytes) + states


def _cache_width(blueprint: Blueprint) -> int:
    """Values that a layer's cache holds of each token."""
    config = blueprint.config
    if config.latent is not None:
        return config.latent.key_value_rank + config.latent.rotary_dim
    return config.num_kv_heads * (config.head_dim + config.value_dim)


def observing_memory(blueprint: Blueprint, length: int, windows: int, gradient: bool = False) -> int:
    """Expected peak of looking at keys and values, `windows` windows of `length` tokens at a time.

    Beside the layer these are the states of the batch, and for one head at a time the scores of one window, with what
    is computed from them and kept for the derivative: nine float32 matrices and three masks of length x length.
    gradient: on the way back there are as many states again, what a layer keeps of one window, and the head.
    """
    scores = (9 * 4 + 3) * length**2
    window = _window_memory(length, blueprint)
    layer = BASE + _layer_bytes(blueprint) + scores + windows * window
    if not gradient:
        return layer
    config = blueprint.config
    head = BASE + 6 * config.vocab_size * config.hidden_size + 6 * 4 * HEAD_ROWS * config.vocab_size
    return max(layer + (windows + 2) * window, head)


def observed_windows(ceiling: int | None, blueprint: Blueprint, length: int, gradient: bool = False) -> int:
    """Windows whose keys are looked at together; UserError for a ceiling that one does not fit under."""
    batch = max(1, _BATCH_TOKENS // length)
    if ceiling is None:
        return batch
    least = observing_memory(blueprint, length, 1, gradient)
    if least > ceiling:
        raise UserError(
            f"--max-memory {ceiling} bytes is too little for --kv-cache: keys and values of a window of {length} "
            f"tokens need about {least} bytes; give a shorter --calibration-length, or a scheme by token"
        )
    each = _window_memory(length, blueprint) * (2 if gradient else 1)
    return min(batch, 1 + (ceiling - least) // each)


def divergence_memory(blueprint: Blueprint, solving: int, tokens: int, rows: int, variants: int) -> int:
    """Expected peak of running `variants` variants of a model on `tokens` tokens side by side.

    solving: the peak of solving half a layer; rows: predictions that are compared together.
    """
    config = blueprint.config
    # Its own states, those of the variants, and what one layer makes of one of them.
    states = (variants + 4) * 4 * tokens * config.hidden_size
    head = (4 + 2) * config.vocab_size * config.hidden_size + 5 * 4 * rows * config.vocab_size
    layer = max(solving, BASE + _layer_bytes(blueprint)) + _window_memory(tokens, blueprint)
    return max(layer, BASE + head) + states


def variants_at_once(
    ceiling: int | None, blueprint: Blueprint, solving: int, tokens: int, rows: int, variants: int
) -> int:
    """Of so many variants those that run side by side; UserError for a ceiling that one does not fit under."""
    if ceiling is None:
        return max(variants, 1)
    least = divergence_memory(blueprint, solving, tokens, rows, 1)
    if least > ceiling:
        raise UserError(
            f"--max-memory {ceiling} bytes is too little to measure what errors do to predictions, which needs about "
            f"{least} bytes; choose by --target-bits with --from-statistics, which measures nothing"
        )
    return max(1, min(variants, 1 + (ceiling - least) // (4 * tokens * blueprint.config.hidden_size)))


def _layer_bytes(blueprint: Blueprint) -> int:
    """Of the largest open layer of a model, while it is read."""
    return max(
        8 * sum(rows * columns for rows, columns in _opened(blueprint, layer)) for layer in _kinds(blueprint)
    )


def _opened(blueprint: Blueprint, layer: int) -> list[tuple[int, int]]:
    """The linears of a layer that are in memory at once: of its routed experts, one."""
    sites = [site for half in Half for site in blueprint.sites(layer, half)]
    return [blueprint.linear_shape(site, layer) for site in (*sites, *blueprint.expert_sites(layer))]


def _kinds(blueprint: Blueprint) -> list[int]:
    """One layer of each structure: layers of equal structure need equal memory."""
    found: dict[object, int] = {}
    for layer in range(blueprint.num_layers):
        found.setdefault(tuple(_opened(blueprint, layer)), layer)
    return list(found.values())


def plan_memory(
    recipe: Recipe,
    blueprint: Blueprint | None,
    largest: int,
    whole: int = 0,
    *,
    prepared: bool = False,
    crossed: bool = False,
    moments: bool = True,
    threads: int = 1,
) -> MemoryPlan:
    """Choose batch and ranges; UserError for a ceiling that nothing fits under.

    moments: whether any method of the plan gathers second moments. threads: that may each solve a half of its own,
    where nothing runs forward. largest: values of a tensor; whole: values of the largest linear that is solved in one
    piece without data.
    """
    streaming = max(min(_PIECES, 12 * 4 * largest), _SOLVED * whole)
    if not recipe.calibrates or blueprint is None:
        peak = BASE + streaming
        if recipe.max_memory is not None and recipe.max_memory < peak:
            raise UserError(
                f"--max-memory {recipe.max_memory} bytes is too little: converting needs about {peak} bytes"
            )
        return MemoryPlan(1, None, peak)
    config = blueprint.config
    forward = recipe.statistics is None
    if forward and recipe.length > config.max_position:
        raise UserError(
            f"--calibration-length {recipe.length} is more than this model's context of {config.max_position}"
        )
    per_window = _window_memory(recipe.length, blueprint) if forward else 0
    batch = max(1, (_WITH_MOMENTS if moments else _CALIBRATED_TOGETHER) // recipe.length)
    kinds = _kinds(blueprint)
    widest = max(columns for layer in kinds for _, columns in _opened(blueprint, layer))

    def fixed(most: int | None) -> int:
        solving = max(
            half_memory(blueprint, layer, half, most, prepared=prepared, crossed=crossed, moments=moments)
            for layer in kinds
            for half in Half
        )
        return BASE + max(solving, streaming)

    def planned(windows: int, most: int | None) -> MemoryPlan:
        each = fixed(most) - BASE
        room = threads if recipe.max_memory is None else (recipe.max_memory - BASE) // each
        halves = 1 if forward else max(1, min(threads, room))
        return MemoryPlan(windows, most, BASE + halves * each + windows * per_window, halves)

    if recipe.max_memory is None:
        return planned(batch, None)
    for parts in (1, 2, 4, 8, 16):
        most = None if parts == 1 else -(-widest // parts)
        needed = fixed(most)
        if most is not None and most < _RANGE_STEP:
            break
        if needed + per_window <= recipe.max_memory:
            if forward:
                batch = min(batch, (recipe.max_memory - needed) // per_window)
            return planned(batch, most)
    raise UserError(
        f"--max-memory {recipe.max_memory} bytes is too little: one layer of this model"
        + (f" with one calibration window of {recipe.length} tokens" if forward else "")
        + f" needs about {needed + per_window} bytes"
    )


def _window_memory(length: int, blueprint: Blueprint) -> int:
    config = blueprint.config
    widest = max(rows for layer in _kinds(blueprint) for rows, _ in _opened(blueprint, layer))
    inner = max(columns for layer in _kinds(blueprint) for _, columns in _opened(blueprint, layer))
    floats = 6 * config.hidden_size + 3 * (widest + inner)
    return 4 * length * (floats + config.num_heads * min(length, 64))
