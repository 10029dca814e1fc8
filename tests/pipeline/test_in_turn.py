"""Half a layer whose last linear is calibrated behind the quantized ones: what runs on, what is seen, who does it."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen_quantize.calibrators.grid_weights import solve_rounding
from qwen_quantize.calibrators.problem import LayerProblem
from qwen_quantize.calibrators.range_search import stored_scale
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.errors import ResumableError
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.formats.spec import FloatFormat
from qwen_quantize.formats.tables import BF16, FP16, FP32
from qwen_quantize.models.blueprint import Half
from qwen_quantize.pipeline import calibrate
from qwen_quantize.pipeline.calibration import Calibration
from qwen_quantize.pipeline.hidden import HiddenStates
from qwen_quantize.pipeline.in_turn import divided_solution
from qwen_quantize.pipeline.memory import last_inputs, states_bytes
from qwen_quantize.pipeline.plan import make_plan
from qwen_quantize.pipeline.recipe import Recipe
from tests.cli.test_resume import hashes
from tests.pipeline.test_methods import invoke, make, options_in, run
from tests.stopping import stopped_after

Step = Callable[[Calibration, int, Half], dict[str, Any]]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("in-turn")
    model = make(folder / "model", "qwen3")
    return [
        "--model-path", model, "--quant-method", "awq", "--no-validate", "--group-size", "32", *options_in(folder),
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_the_next_half_reads_what_the_written_one_gives(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize: Step = calibrate.quantize_in_turn
    states: dict[int, torch.Tensor] = {}

    def keeping(run: Calibration, layer: int, half: Half) -> dict[str, Any]:
        if layer == 0 and half is Half.ATTENTION:
            states[0] = run.states.read(0, 0, 8)
        record = quantize(run, layer, half)
        if half is Half.MLP and not run.is_last(layer):
            states[layer + 1] = run.states.read(2 * layer + 2, 0, 8)
        return record

    monkeypatch.setattr(calibrate, "quantize_in_turn", keeping)
    model, out = make(tmp_path / "model", family), tmp_path / "out"
    options = ["--quant-method", "awq", "--no-validate", "--group-size", "32", *options_in(tmp_path)]
    run("--model-path", model, "--output-path", out, *options)
    written = StreamedModel(ModelReader(open_source(out)))
    assert sorted(states) == list(range(written.num_layers))
    original = StreamedModel(ModelReader(open_source(model)))
    hidden = unquantized = states[0]
    for layer in range(written.num_layers - 1):
        written.open_layer(layer)
        original.open_layer(layer)
        hidden, unquantized = written.run_layer(hidden), original.run_layer(unquantized)
        # Products of bfloat16 numbers here, of float32 ones there.
        added = states[layer + 1] - states[layer]
        assert (hidden - states[layer + 1]).norm() < 0.01 * added.norm()
        assert (hidden - unquantized).norm() > 0.03 * added.norm()


@pytest.mark.parametrize("stop_after", [1, 2])
def test_an_interrupted_run_resumes_to_the_same_bytes(
    stop_after: int, command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*command, "--output-path", tmp_path / "whole")
    with stopped_after(stop_after, monkeypatch):
        assert invoke(*command, "--output-path", tmp_path / "out").exit_code == 130
    run(*command, "--output-path", tmp_path / "out", "--resume")
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("method", "family", "expected"),
    [("awq", "qwen3", 4), ("awq_v2", "qwen3", 0), ("awq", "deepseek-v3", 1)],
)
def test_who_takes_linears_in_turn(
    method: str, family: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with latent attention and experts, only the dense MLP in its first layer."""
    quantize: Step = calibrate.quantize_in_turn
    seen: list[tuple[int, Half]] = []

    def counting(run: Calibration, layer: int, half: Half) -> dict[str, Any]:
        seen.append((layer, half))
        return quantize(run, layer, half)

    monkeypatch.setattr(calibrate, "quantize_in_turn", counting)
    model = make(tmp_path / "model", family)
    options = ["--quant-method", method, "--no-validate", "--group-size", "32", *options_in(tmp_path)]
    run("--model-path", model, "--output-path", tmp_path / "out", *options)
    assert len(seen) == expected


def test_inputs_lie_on_disk_and_not_in_memory(tmp_path: Path) -> None:
    """The plan's memory is that of a method without them, however many tokens; its disk space counts them."""
    blueprint = ModelReader(open_source(make(tmp_path / "model", "qwen3"))).blueprint
    widths = [last_inputs(blueprint, 0, half) for half in Half]
    tokens = 4096 * 64
    aside = states_bytes(blueprint, tokens, in_turn=True) - states_bytes(blueprint, tokens, in_turn=False)
    assert aside == 2 * tokens * max(width for width in widths if width is not None)
    source = open_source(tmp_path / "model")
    few, many = (
        make_plan(
            Recipe(str(tmp_path), "cpu", "awq", samples=samples, length=64, dataset="text", group_size=32),
            source,
        )
        for samples in (64, 4096)
    )
    assert few.memory == many.memory
    assert many.disk_bytes - few.disk_bytes == states_bytes(blueprint, tokens - 64 * 64, in_turn=True)


def test_held_inputs_come_back_as_bfloat16(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(shape, generator=generator) for shape in ((2, 5, 8), (1, 5, 8))]
    states = HiddenStates(tmp_path / "work", 3, 5, 4)
    with states.holding() as held:
        for batch in batches:
            held.append(batch)
        assert [path.name for path in (tmp_path / "work").iterdir()] == []  # no name that could stay behind
        for _ in range(2):
            found = list(held.read())
            assert all(
                torch.equal(one, batch.bfloat16().float()) for one, batch in zip(found, batches, strict=True)
            )


def test_a_full_disk_under_held_inputs_can_be_resumed_from(tmp_path: Path) -> None:
    with HiddenStates(tmp_path / "work", 1, 4, 4).holding() as held:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            with pytest.raises(ResumableError, match="work"):
                held.append(torch.zeros(1, 4096, 4))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("format_", [FP32, FP16, BF16])
def test_divided_rows_keep_their_codes(format_: FloatFormat) -> None:
    spec = replace(SCHEMES["w4a16"].with_group(32).with_zero_point().weight, scale_format=format_)
    scheme = replace(SCHEMES["w4a16"].with_group(32), weight=spec)
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    solution = solve_rounding(LayerProblem("sample", weight, scheme, RNE_SATURATE))
    rows, divisor = torch.tensor([1, 2, 5]), torch.tensor([0.37, 2.6, 1.9])
    found = divided_solution(solution, rows, divisor, format_)
    assert found is not None
    divided = found.quantized
    assert torch.equal(divided.codes, solution.quantized.codes)
    expected = solution.quantized.dequantize()
    expected[rows] /= divisor.unsqueeze(1)
    torch.testing.assert_close(divided.dequantize(), expected, rtol=2.0**-format_.mantissa_bits, atol=0)
    assert torch.equal(divided.scale, stored_scale(divided.scale, format_))  # as it can be written
    kept = [0, 3, 4, 6, 7]
    assert torch.equal(divided.scale[kept], solution.quantized.scale[kept])


def test_scales_that_would_lose_bits_are_found_anew() -> None:
    scheme = SCHEMES["w4a16"].with_group(32)
    weight = 1e-4 * torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    solution = solve_rounding(LayerProblem("sample", weight, scheme, RNE_SATURATE))
    rows, divisor = torch.tensor([1, 2]), torch.tensor([100.0, 100.0])
    assert divided_solution(solution, rows, divisor, FP16) is None
    assert divided_solution(solution, rows, divisor, BF16) is not None


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next"])
def test_a_norm_inside_the_half_is_divided_too(family: str, tmp_path: Path) -> None:
    """That of a delta-net, which all its heads share, stands where other attention has rows of values."""
    model = make(tmp_path / "model", family)
    state = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    norms = [name for name in state if name.endswith("linear_attn.norm.weight")]
    for name in norms:
        state[name] = state[name] * torch.exp(1.5 * torch.randn(state[name].shape, generator=generator))
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    options = ["--quant-method", "awq", "--group-size", "0", *options_in(tmp_path)]
    record = run("--model-path", model, "--output-path", out, *options)
    assert record["validation"]["kl_mean"] < 0.3, record["validation"]
    written = load_file(out / "model.safetensors")
    assert any(not torch.equal(written[name], state[name]) for name in norms)
