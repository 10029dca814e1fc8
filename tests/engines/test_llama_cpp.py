"""llama.cpp itself loads what `--layout gguf` writes and says the same as the bundled engine.

It rounds the inputs of quantized products to int8 in groups of 32, which the engine does not, so log-probabilities
differ by what that does: the bounds below are about three times what was measured on a processor with AVX2.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.cli.main import app
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.pipeline.run import source_tokenizer
from tests.checkpoint.tiny_gguf import TEXTS, make_model, tokenizer
from tests.engines.environments import engine_python

pytestmark = pytest.mark.slow

TOKENS = 24
PROMPTS = (
    "It was a truth universally acknowledged, that",
    "She had been 27 years in the country; and",
    "“My dear Mr. Bennet,” said his lady to him one day,",
    "The carriage stopped\n\nbefore the house.  Everybody",
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """greedy: the share of tokens that both would choose; tie: where they differ, how much the engine's own token is
    ahead of llama.cpp's at most. mean, most: of the differences of log-probabilities.
    """

    greedy: float
    tie: float
    mean: float
    most: float


def agreement(folder: Path, prompts: Sequence[str]) -> Agreement:
    (file,) = folder.glob("*.gguf")
    python = engine_python("llama_cpp")
    runner = Path(__file__).with_name("run_llama_cpp.py")
    source = open_source(folder)
    model, tokenizer = load_model(ModelReader(source)), source_tokenizer(source)
    # llama.cpp reports no token that is a part of a character, which a random model is full of.
    count = model.blueprint.config.vocab_size
    banned = [number for number in range(count) if not tokenizer.decode([number]).isascii()]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), str(runner), str(file), str(TOKENS)],
        input=json.dumps({"prompts": list(prompts), "banned": banned}),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=600,
    )
    assert done.stdout, done.stderr[-2000:]
    same, ties, differences = [], [], []
    for prompt, answer in zip(prompts, json.loads(done.stdout)["answers"], strict=True):
        ids = tokenizer.encode(prompt)
        assert answer["prompt_tokens"] == len(ids), prompt
        assert len(answer["ids"]) == TOKENS
        with torch.inference_mode():
            logits = model.forward(torch.tensor([[*ids, *answer["ids"]]]))[0, len(ids) - 1 : -1]
        scores = logits.float().log_softmax(-1)
        chosen = torch.tensor(answer["ids"])
        allowed = scores.index_fill(-1, torch.tensor(banned, dtype=torch.int64), -torch.inf)
        same.append((allowed.argmax(-1) == chosen).float().mean())
        ours = scores.gather(-1, chosen[:, None])[:, 0]
        ties.append((allowed.amax(-1) - ours).max())
        differences.append((ours - torch.tensor(answer["logprobs"])).abs())
    apart = torch.cat(differences)
    greedy, tie = float(torch.stack(same).mean()), float(torch.stack(ties).max())
    return Agreement(greedy, tie, float(apart.mean()), float(apart.max()))


def quantized(model: str | None, out: Path, scheme: str) -> Path:
    method = ["mxfp4"] if scheme == "mxfp4" else ["rtn", "--scheme", scheme]
    arguments = ["--device", "cpu", "--layout", "gguf", "--output-path", str(out), "--no-validate", "-q"]
    if model is not None:
        arguments += ["--model-path", model]
    done = CliRunner().invoke(app, [*arguments, "--quant-method", *method])
    assert done.exit_code == 0, done.output
    return out


def assert_same(found: Agreement) -> None:
    """The greedy text is equal but for ties: tokens no further apart than the two programs are."""
    assert found.greedy > 0.95, found
    assert found.tie < 0.1, found
    assert found.mean < 0.025, found
    assert found.most < 0.1, found


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "mxfp4"])
def test_the_embedded_model_says_the_same(tmp_path: Path, scheme: str) -> None:
    found = agreement(quantized(None, tmp_path / scheme, scheme), PROMPTS)
    assert_same(found)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_the_other_architectures_compute_the_same(tmp_path: Path, arch: str) -> None:
    """A random model: rows of q or k in a wrong order, or a bias lost, would change every token."""
    folder = tmp_path / "source"
    model = make_model(arch)
    for parameter in model.parameters():
        parameter.data.mul_(0.125 if parameter.dim() > 1 else 1.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert_same(agreement(quantized(str(folder), tmp_path / "out", "w8a16"), TEXTS[:3]))
