"""What is packed here, decompressed by the package that the format comes from."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qwen_quantize.checkpoint.awq_layout import AWQ
from qwen_quantize.checkpoint.compressed_tensors import COMPRESSED_TENSORS
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.models.lookup import require_blueprint
from tests.checkpoint.quantized_samples import COMPRESSED, sample
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", COMPRESSED)
def test_the_package_finds_the_same_values(name: str) -> None:
    """In the dtype that it gives them: that of the scales, bfloat16 for FP4, FP6 and MX."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig

    scheme = COMPRESSED[name]
    quantized = sample(scheme, (96, 128))
    tensors = COMPRESSED_TENSORS.pack("m", quantized, scheme, input_amax=3.0)
    config = QuantizationConfig(**COMPRESSED_TENSORS.quantization_config({"m": scheme}, ["lm_head"]))
    theirs = config.config_groups["group_0"]
    stated = getattr(theirs.format, "value", theirs.format)
    assert infer_module_format(torch.nn.Linear, theirs).value == stated

    state = {key.removeprefix("m."): tensor for key, tensor in tensors.items()}
    found = BaseCompressor.get_value_from_registry(stated).decompress(state, theirs)["weight"]
    expected = quantized.dequantize().to(found.dtype)
    if "nvfp4" in name:  # a quotient there, a product here: a step of bfloat16 where a value lies between two
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
        assert float((found != expected).float().mean()) < 1e-3
    else:
        assert torch.equal(found, expected)


def test_the_package_converts_autoawq_to_the_same_words() -> None:
    """AWQ as written here, through the package's own converter, is pack-quantized as written here."""
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    scheme = COMPRESSED["w4a16 with zero points"]
    quantized = sample(scheme, (96, 128))
    converter = AutoAWQConverter.from_autoawq_config(AWQ.quantization_config({"m": scheme}, []))
    found = converter.process(AWQ.pack("m", quantized, scheme))
    expected = COMPRESSED_TENSORS.pack("m", quantized, scheme)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


LOADED = ["w4a16, float32 scales", "w4a8", "w8a8", "fp8", "fp8 weights", "ue8m0"]


@pytest.mark.parametrize("names", [*([name] for name in LOADED), LOADED], ids=str)
def test_transformers_loads_the_folder(tmp_path: Path, names: list[str]) -> None:
    """Logits equal those of the dequantized weights; several schemes in one folder too.

    The casts of inputs are turned off: they are the reader's own. Zero points are not among the schemes, for
    transformers 5.24 allocates them unpacked and refuses what the package itself writes.
    """
    from transformers import AutoModelForCausalLM

    plain, packed = tmp_path / "plain", tmp_path / "packed"
    make_tiny(plain, "llama", hidden_size=64, intermediate_size=128, num_key_value_heads=4, seed=3)
    source = open_source(plain)
    modules = require_blueprint(source.config).linear_modules()
    schemes = {name: COMPRESSED[names[number % len(names)]] for number, name in enumerate(modules)}
    tensors = {name: source.read(name) for name in source.names()}
    written = dict(tensors)
    for number, (name, shape) in enumerate(modules.items()):
        quantized = sample(schemes[name], shape, seed=number)
        scale = (
            quantized.scale * 2.0**-9 if schemes[name].name != "ue8m0" else quantized.scale.clamp_max(2**-12)
        )
        quantized = replace(quantized, scale=scale)
        tensors[f"{name}.weight"] = quantized.dequantize()
        del written[f"{name}.weight"]
        written |= COMPRESSED_TENSORS.pack(name, quantized, schemes[name])
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    packed.mkdir()
    save_file(written, packed / "model.safetensors", metadata={"format": "pt"})
    config = source.config | {
        "quantization_config": COMPRESSED_TENSORS.quantization_config(schemes, ["lm_head"])
    }
    (packed / "config.json").write_text(json.dumps(config))

    tokens = torch.randint(1, 160, (2, 24), generator=torch.Generator().manual_seed(1))
    logits = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the package, about its own calls
        for folder in (plain, packed):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            model(tokens)  # the package decompresses at the first call
            for module in model.modules():
                if hasattr(module, "quantization_scheme"):
                    module.quantization_enabled = False
            logits.append(model(tokens).logits)
    assert bool(logits[0].isfinite().all())
    assert torch.equal(logits[0], logits[1])
