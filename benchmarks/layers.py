"""Peak memory and time against the number of layers and of experts, on synthetic models.

    python benchmarks/layers.py [--json] [--work-dir FOLDER]

Makes random models of 4, 8, 16 and 32 layers, dense and sparse, and of 16, 32 and 64 experts, calibrates each
with the command line, and prints the peaks, how far they are apart, and R^2 of a straight line through the
times. The memory of the program must not depend on either number.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qwen_quantize.models.lookup import require_blueprint

VOCABULARY = 2000
LAYERS = (4, 8, 16, 32)
EXPERTS = (16, 32, 64)
WINDOWS, LENGTH = 4, 256

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SPARSE: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def make_model(folder: Path, config: dict[str, Any]) -> None:
    """A checkpoint of random bfloat16 weights whose activations keep their size, with a word-level tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in require_blueprint(config).expected_tensors().items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            tensors[name] = values.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    vocabulary = {"<eos>": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    tokenizer = {
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<eos>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def make_text(path: Path) -> None:
    ids = torch.randint(1, VOCABULARY, (4 * WINDOWS, LENGTH), generator=torch.Generator().manual_seed(1))
    lines = (json.dumps({"text": " ".join(f"w{i}" for i in row)}) for row in ids.tolist())
    path.write_text("\n".join(lines) + "\n")


def quantize(model: Path, text: Path, output: Path) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "qwen_quantize", "--json", "--quiet", "--no-validate", "--device", "ascend",
        "--model-path", str(model), "--output-path", str(output), "--calibration-dataset", str(text),
        "--calibration-samples", str(WINDOWS), "--calibration-length", str(LENGTH),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    record: dict[str, Any] = json.loads(done.stdout)
    return {key: record[key] for key in ("seconds", "peak_memory_bytes", "output_bytes")}


def squared_correlation(x: list[float], y: list[float]) -> float:
    """R^2 of the least-squares line through the points."""
    pairs = torch.tensor([x, y], dtype=torch.float64)
    return float(torch.corrcoef(pairs)[0, 1] ** 2)


def measure(folder: Path, base: dict[str, Any], key: str, values: tuple[int, ...]) -> dict[str, Any]:
    text = folder / "text.jsonl"
    make_text(text)
    rows = []
    for value in values:
        model, output = folder / f"model-{value}", folder / f"out-{value}"
        make_model(model, {"num_hidden_layers": 4, **base, key: value})
        rows.append({key: value, **quantize(model, text, output)})
        print(json.dumps(rows[-1]), file=sys.stderr)
    peaks = [row["peak_memory_bytes"] for row in rows]
    return {
        "rows": rows,
        "peak_spread": max(peaks) / min(peaks) - 1,
        "r_squared": squared_correlation([row[key] for row in rows], [row["seconds"] for row in rows]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--work-dir", type=Path, help="where the models go (default: a temporary folder)")
    options = parser.parse_args()
    record = {}
    for name, base, key, values in (
        ("dense layers", DENSE, "num_hidden_layers", LAYERS),
        ("sparse layers", SPARSE, "num_hidden_layers", LAYERS),
        ("experts", SPARSE, "num_experts", EXPERTS),
    ):
        with tempfile.TemporaryDirectory(dir=options.work_dir) as folder:
            record[name] = measure(Path(folder), base, key, values)
    if options.json:
        print(json.dumps(record, indent=1))
        return
    for name, found in record.items():
        for row in found["rows"]:
            print(f"{name}: {row}")
        print(f"{name}: peaks within {found['peak_spread']:.1%}, R^2 of time {found['r_squared']:.4f}")


if __name__ == "__main__":
    main()
