"""Speed at batch 1: our int4 engine, transformers' float32 `generate`, llama.cpp; 128 tokens of prompt and 128 new.

    python benchmarks/decode.py [--json] [--cache build/real-model] [--threads 2] [--rounds 3]

SmolLM2-135M is the Q4_1 GGUF as llama.cpp runs it (its embedding and head are Q8_0), the same weights made w4a16 in
groups of 32 by `rtn` with an int8 head for us, and float32 for transformers. A model in the shape of Qwen2.5-0.5B with
random weights and a vocabulary of 32000 has no GGUF: only ours and transformers'. Contenders take turns, and each
one's best round counts.

llama.cpp gets an environment of its own in build/engines (`CMAKE_ARGS` is passed on to its build: a virtual machine
that shows AMX without allowing it needs -DCMAKE_C_FLAGS=-mno-amx-tile and the like).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.fast_linear import Input
from qwen_quantize.engine.fast_load import FastOptions, HeadForm, load_fast
from qwen_quantize.engine.generate import measure_speed
from qwen_quantize.engine.model import Model
from qwen_quantize.engine.roofline import Roofline, measured_read_bandwidth

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the root, from which its neighbours are imported

from benchmarks.peers.environments import EnvironmentRefusal, python_of

ROOT = Path(__file__).resolve().parent.parent
PROMPT, NEW = 128, 128
VARIANTS = {
    "ours": FastOptions(head=HeadForm.INT8),
    "ours, head as stored": FastOptions(),
    "ours, int8 inputs": FastOptions(Input.INT8_BLOCKS, HeadForm.INT8),
    "ours, float32 inputs": FastOptions(Input.FLOAT, HeadForm.INT8),
}


def quantized(source: Path, folder: Path, group: int) -> Path:
    """The model as w4a16 by rounding, made once."""
    if not (folder / "config.json").is_file():
        command = [sys.executable, "-m", "qwen_quantize", "--model-path", str(source), "--device", "cpu"]
        command += ["--scheme", "w4a16", "--quant-method", "rtn", "--group-size", str(group), "--no-validate"]
        command += ["--output-path", str(folder), "--overwrite", "--allow-unsupported", "--quiet"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def qwen_shaped(folder: Path) -> Path:
    """Random weights in the shape of Qwen2.5-0.5B, in bfloat16, with a vocabulary of 32000."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
        heads = {"num_attention_heads": 14, "num_key_value_heads": 2}
        config = AutoConfig.for_model("qwen2", vocab_size=32000, tie_word_embeddings=True, **sizes, **heads)
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def float32_folder(gguf: Path, folder: Path) -> Path:
    """The GGUF's weights as float32, for transformers."""
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        source = open_source(gguf)
        save_file({name: source.read(name).float() for name in source.names()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**source.config, "dtype": "float32"}))
    return folder


def transformers_speed(model: Any, prompt: torch.Tensor) -> tuple[float, float]:
    """(prefill, decode) seconds of `generate`, by the difference of a run with one new token and one with all."""
    times = []
    for new in (1, NEW + 1):
        begin = time.perf_counter()
        model.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        times.append(time.perf_counter() - begin)
    return times[0], times[1] - times[0]


class LlamaCpp:
    """llama.cpp in a process that waits between its turns."""

    def __init__(self, gguf: Path, threads: int, engines: Path) -> None:
        python = python_of("llama", engines)
        script = Path(__file__).with_name("llama_cpp_speed.py")
        command = [str(python), str(script), str(gguf), str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.build = self._answer()["build"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EnvironmentRefusal(f"llama.cpp ended with exit status {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def __call__(self, prompt: torch.Tensor) -> tuple[float, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": prompt[0].tolist(), "new": NEW}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        return answer["prefill"], answer["decode"]


def our_speed(model: Model, prompt: torch.Tensor) -> tuple[float, float]:
    speed = measure_speed(model, prompt, NEW)
    return speed.prefill_seconds, sum(speed.step_seconds)


def compare(packed: Path, plain: Path, gguf: Path | None, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all contenders in turn on one model; tokens per second of each one's best."""
    from transformers import AutoModelForCausalLM

    source = open_source(packed)
    models = {name: load_fast(source, None, variant) for name, variant in VARIANTS.items()}
    config = models["ours"].blueprint.config
    prompt = torch.randint(config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    torch_model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    contenders: dict[str, Any] = {
        name: lambda given, model=model: our_speed(model, given) for name, model in models.items()
    }
    contenders["transformers"] = lambda given: transformers_speed(torch_model, given)
    record: dict[str, Any] = {"not_run": {}}
    if gguf is not None:
        try:
            peer = LlamaCpp(gguf, options.threads, options.engines)
            peer(prompt)
            contenders["llama.cpp"], record["llama_cpp_build"] = peer, peer.build
        except EnvironmentRefusal as refusal:
            record["not_run"]["llama.cpp"] = str(refusal)
    best: dict[str, list[float]] = {name: [float("inf")] * 2 for name in contenders}
    bandwidth = 0.0
    for _ in range(options.rounds):
        bandwidth = max(bandwidth, measured_read_bandwidth())
        for name, run in contenders.items():
            best[name] = [min(pair) for pair in zip(best[name], run(prompt), strict=True)]
    record["read_bandwidth_bytes_per_second"] = bandwidth
    record["prefill_tokens_per_second"] = {name: PROMPT / pair[0] for name, pair in best.items()}
    record["decode_tokens_per_second"] = {name: NEW / pair[1] for name, pair in best.items()}
    speed = measure_speed(models["ours"], prompt, 2)
    bound = Roofline(bandwidth, None).decode_bound(speed)
    assert bound is not None
    record["bandwidth_bound_fraction"] = NEW / best["ours"][1] / bound
    for key, name in (("transformers", "transformers"), ("llama_cpp", "llama.cpp")):
        if name in best:
            record[f"ratio_to_{key}"] = best[name][1] / best["ours"][1]
            record[f"prefill_ratio_to_{key}"] = best[name][0] / best["ours"][0]
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "real-model")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "decode")
    parser.add_argument("--engines", type=Path, default=ROOT / "build" / "engines")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("smollm2", "qwen"), help="one of the two models")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not list(options.cache.glob("*.gguf")):
        tool = ROOT / "tools" / "real_model.py"
        subprocess.run(
            [sys.executable, str(tool), "--cache", str(options.cache)], check=True, stdout=sys.stderr
        )
    (gguf,) = options.cache.glob("*.gguf")
    record: dict[str, Any] = {"threads": options.threads, "prompt_tokens": PROMPT, "new_tokens": NEW}
    if options.only != "qwen":
        packed = quantized(gguf, options.folder / "smollm2-w4a16", 32)
        plain = float32_folder(gguf, options.folder / "smollm2-float32")
        record["smollm2"] = compare(packed, plain, gguf, options)
    if options.only != "smollm2":
        plain = qwen_shaped(options.folder / "qwen-shaped")
        record["qwen_shaped"] = compare(
            quantized(plain, options.folder / "qwen-w4a16", 64), plain, None, options
        )
    first = record.get("smollm2", record.get("qwen_shaped", {}))
    keys = ("ratio_to_llama_cpp", "ratio_to_transformers", "prefill_ratio_to_llama_cpp")
    record |= {
        key: first.get(key) for key in (*keys, "prefill_ratio_to_transformers", "bandwidth_bound_fraction")
    }
    if options.json:
        print(json.dumps(record, indent=2))
        return
    for model in ("smollm2", "qwen_shaped"):
        for name, rate in record.get(model, {}).get("decode_tokens_per_second", {}).items():
            prefill = record[model]["prefill_tokens_per_second"][name]
            print(f"{model:12s} {name:22s} prefill {prefill:7.0f}  decode {rate:7.1f} tokens/s")
    print({key: record[key] for key in keys})


if __name__ == "__main__":
    main()
