"""Train the small Qwen3-style language model that ships in the package, with its tokenizer.

    nice python tools/train_embedded.py [--deb FILE] [--output FOLDER] [--threads 2]
    python tools/train_embedded.py --steps 20 --text TRAIN.txt --heldout HELDOUT.txt --output FOLDER

The second form is for a smoke run.

A byte-level BPE tokenizer and a dense model (grouped-query attention, normed queries and keys, SwiGLU, tied
head) are trained on four novels and the greater part of a fifth; the calibration and held-out texts are
never seen. Seeds are fixed: the same texts, library versions and thread count give the same bytes.
Prints one JSON document with sizes and perplexities to stdout.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from embedded_texts import EMBEDDED, EmbeddedTextError, novels_from, training_texts
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
VOCABULARY = 2048
MAX_POSITIONS = 2048
ROPE_THETA = 10000.0
# What config.json takes over from transformers' config; its other fields are that library's own business.
CONFIG_FIELDS = (
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
)
# Qwen2's way to cut text into words, so that the tokenizer class readers pick for `qwen3` is the right one.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SEED = 20260
STEPS = 2400
TOKENS_PER_STEP = 2048
SEQUENCE = 512
# The last steps see windows of 2048 tokens, so that every position the config promises has been trained.
LONG_FRACTION = 0.2
PEAK_LEARNING_RATE = 3e-3
LAST_LEARNING_RATE = 1e-4
WARMUP_FRACTION = 0.04
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Train the byte-level BPE: 2048 tokens at most, `<|endoftext|>` first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """Encode the texts one after the other, `<|endoftext|>` after each: int64 [tokens]."""
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer.encode(text).ids, END_OF_TEXT_ID]
    return torch.tensor(ids)


def model_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        use_cache=False,
        attn_implementation="sdpa",
    )


def batches(stream: torch.Tensor, steps: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield int64 [sequences, length + 1] per step, so that each epoch passes over the whole stream.

    An epoch shifts the window grid by a random offset and shuffles the windows.
    """
    done = 0
    while done < steps:
        long = done >= steps * (1 - LONG_FRACTION)
        length = min(MAX_POSITIONS if long else SEQUENCE, stream.numel() - 1)
        room = (stream.numel() - 1) % length
        offset = int(torch.randint(room + 1, (), generator=generator))
        starts = torch.arange(offset, stream.numel() - length, length)
        starts = starts[torch.randperm(starts.numel(), generator=generator)]
        for group in torch.split(starts, max(1, TOKENS_PER_STEP // length)):
            yield torch.stack([stream[start : start + length + 1] for start in group.tolist()])
            done += 1
            if done == steps or (not long and done >= steps * (1 - LONG_FRACTION)):
                break


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine."""
    warmup = max(1, round(steps * WARMUP_FRACTION))
    if step < warmup:
        return PEAK_LEARNING_RATE * (step + 1) / warmup
    along = (step - warmup) / max(1, steps - warmup)
    swing = 0.5 * (1 + math.cos(math.pi * along))
    return LAST_LEARNING_RATE + (PEAK_LEARNING_RATE - LAST_LEARNING_RATE) * swing


def train(stream: torch.Tensor, steps: int) -> Qwen3ForCausalLM:
    """Train in float32 from a fixed seed and return the model with its weights rounded to bfloat16 values."""
    torch.manual_seed(SEED)  # transformers initialises from the global generator
    model = Qwen3ForCausalLM(model_config())
    generator = torch.Generator().manual_seed(SEED)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    began, smooth = time.monotonic(), math.nan
    for step, batch in enumerate(batches(stream, steps, generator)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        logits = model(input_ids=batch[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        smooth = loss.item() if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss.item()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            seconds = time.monotonic() - began
            print(f"step {step + 1}/{steps}: loss {smooth:.3f}, {seconds:.0f} s", file=sys.stderr, flush=True)
    with torch.no_grad():  # parameters only: the rotary frequencies stay float32, as they do for every reader
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model.eval()


@torch.inference_mode()
def perplexity(model: Qwen3ForCausalLM, stream: torch.Tensor, window: int) -> float:
    """Perplexity per token over windows of `window` tokens that do not overlap; sums in float64."""
    total, count = 0.0, 0
    for part in torch.split(stream, window):
        if part.numel() > 1:
            logits = model(input_ids=part[None, :-1]).logits[0]
            total += cross_entropy(logits, part[1:], reduction="sum").double().item()
            count += part.numel() - 1
    return math.exp(total / count) if count else math.nan


def unigram_perplexity(train_stream: torch.Tensor, stream: torch.Tensor) -> float:
    """Perplexity of token frequencies in the training stream, each count plus one."""
    counts = torch.bincount(train_stream, minlength=VOCABULARY).double() + 1
    return math.exp(-(counts / counts.sum()).log()[stream].mean().item())


@torch.inference_mode()
def greedy(model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: str, tokens: int) -> str:
    ids = tokenizer.encode(prompt).ids
    for _ in range(tokens):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return str(tokenizer.decode(ids))


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """Write the Hugging Face folder; the tied head is left out, as its values are the embedding's."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict()
    kept = {name: config[name] for name in CONFIG_FIELDS}
    kept |= {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "rope_theta": ROPE_THETA,  # older readers look only here
        "use_cache": True,
    }
    _write_json(folder / "config.json", kept)
    generation: dict[str, object] = {
        "bos_token_id": END_OF_TEXT_ID,
        "do_sample": False,
        "eos_token_id": END_OF_TEXT_ID,
    }
    _write_json(folder / "generation_config.json", generation)
    # No model_max_length: it only makes readers warn about texts that are cut into windows afterwards.
    settings = {
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END_OF_TEXT),
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    _write_json(folder / "tokenizer_config.json", settings)
    tokenizer.save(str(folder / "tokenizer.json"))
    state = {name: tensor.to(torch.bfloat16) for name, tensor in sorted(model.state_dict().items())}
    del state["lm_head.weight"]
    weights = folder / "model.safetensors"
    save_file(state, str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)  # it comes out readable by its owner alone, and a wheel would keep that


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8", newline="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--deb", type=Path, help="the novels' package; fetched with apt-get when left out")
    parser.add_argument("--text", type=Path, action="append", help="train on these files instead of novels")
    parser.add_argument("--heldout", type=Path, default=EMBEDDED / "heldout.txt", help="text to score")
    parser.add_argument("--output", type=Path, default=EMBEDDED / "dense", help="model folder to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps; a few for a smoke run")
    parser.add_argument("--threads", type=int, default=2, help="torch threads; part of what makes the bytes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    began = time.monotonic()
    try:
        heldout = options.heldout.read_text(encoding="utf-8")
        if options.text:
            texts = [path.read_text(encoding="utf-8") for path in options.text]
        else:
            texts = training_texts(novels_from(options.deb))
    except (EmbeddedTextError, OSError) as error:
        print(f"train_embedded: {error}", file=sys.stderr)
        return 2
    tokenizer = train_tokenizer(texts)
    stream, heldout_stream = token_stream(tokenizer, texts), torch.tensor(tokenizer.encode(heldout).ids)
    if stream.numel() < SEQUENCE:
        print(f"train_embedded: {stream.numel()} tokens of text; give {SEQUENCE} at least", file=sys.stderr)
        return 2
    model = train(stream, options.steps)
    save(options.output, model, tokenizer)
    windows = {str(window): perplexity(model, heldout_stream, window) for window in (256, 512, 2048)}
    sample = greedy(model, tokenizer, heldout[:160].rsplit(" ", 1)[0], 60)
    record = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(path.stat().st_size for path in options.output.iterdir()),
        "steps": options.steps,
        "training_tokens": stream.numel(),
        "epochs": options.steps * TOKENS_PER_STEP / stream.numel(),
        "heldout_tokens": heldout_stream.numel(),
        "heldout_perplexity_by_window": windows,
        "heldout_unigram_perplexity": unigram_perplexity(stream, heldout_stream),
        "greedy_sample": sample,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(record, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
