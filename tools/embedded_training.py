"""What the two scripts that train the package's language models share.

Texts and token streams, the batches and the schedule, the optimizer's loop, perplexities, and the parts of a
Hugging Face folder that both models write alike.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from tools.embedded_texts import EMBEDDED, EmbeddedTextError, novels_from, training_texts

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
VOCABULARY = 2048
MAX_POSITIONS = 2048
ROPE_THETA = 10000.0

SEED = 20260
TOKENS_PER_STEP = 2048
SEQUENCE = 512
# The last steps see windows of 2048 tokens, so that every position the config promises has been trained.
LONG_FRACTION = 0.2
PEAK_LEARNING_RATE = 3e-3
LAST_LEARNING_RATE = 1e-4
WARMUP_FRACTION = 0.04
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0
# Config fields that every model takes over from transformers' config, whatever its family.
COMMON_FIELDS = (
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
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

# Token ids [batch, length] to logits [batch, positions, vocabulary].
Logits = Callable[[torch.Tensor], torch.Tensor]


# --- the command line and its texts ---


def options_parser(description: str | None, output: Path, steps: int) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--deb", type=Path, help="the novels' package; fetched with apt-get when left out")
    parser.add_argument("--text", type=Path, action="append", help="train on these files instead of novels")
    parser.add_argument("--heldout", type=Path, default=EMBEDDED / "heldout.txt", help="text to score")
    parser.add_argument("--output", type=Path, default=output, help="model folder to write")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps; a few for a smoke run")
    parser.add_argument("--threads", type=int, default=2, help="torch threads; part of what makes the bytes")
    return parser


@dataclass(frozen=True)
class Texts:
    """The texts to train on and the one to score."""

    training: Sequence[str]
    heldout: str


def read_texts(options: argparse.Namespace) -> Texts:
    """Read what the options name; raise EmbeddedTextError or OSError where a text cannot be had."""
    heldout = options.heldout.read_text(encoding="utf-8")
    if options.text:
        return Texts([path.read_text(encoding="utf-8") for path in options.text], heldout)
    return Texts(training_texts(novels_from(options.deb)), heldout)


@dataclass(frozen=True)
class Streams:
    """The same texts as int64 token ids [tokens]."""

    training: torch.Tensor
    heldout: torch.Tensor


def token_streams(tokenizer: Tokenizer, texts: Texts) -> Streams:
    """Encode the training texts one after the other, `<|endoftext|>` after each, and the held-out text.

    Raises EmbeddedTextError where the training texts make no window.
    """
    ids: list[int] = []
    for text in texts.training:
        ids += [*tokenizer.encode(text).ids, END_OF_TEXT_ID]
    if len(ids) < SEQUENCE:
        raise EmbeddedTextError(f"{len(ids)} tokens of text; give {SEQUENCE} at least")
    return Streams(torch.tensor(ids), torch.tensor(tokenizer.encode(texts.heldout).ids))


# --- training ---


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


def optimize(
    model: torch.nn.Module,
    stream: torch.Tensor,
    steps: int,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Train the parameters in float32 with AdamW, then round them to bfloat16 values.

    `loss_of` turns a batch [sequences, length + 1] into a scalar; its progress goes to stderr.
    """
    generator = torch.Generator().manual_seed(SEED)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    began, smooth = time.monotonic(), math.nan
    for step, batch in enumerate(batches(stream, steps, generator)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        after_step()
        smooth = loss.item() if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss.item()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            seconds = time.monotonic() - began
            print(f"step {step + 1}/{steps}: loss {smooth:.3f}, {seconds:.0f} s", file=sys.stderr, flush=True)
    with torch.no_grad():  # parameters only: the rotary frequencies stay float32, as they do for every reader
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    model.eval()


# --- measuring ---


@torch.inference_mode()
def perplexity(logits_of: Logits, stream: torch.Tensor, window: int, ahead: int = 1) -> float:
    """Perplexity per token over windows of `window` tokens that do not overlap; sums in float64.

    `logits_of` gets all of a window but its last token; its position i is scored on token i + `ahead`.
    """
    total, count = 0.0, 0
    for part in torch.split(stream, window):
        if part.numel() > ahead:
            logits = logits_of(part[None, :-1])[0]
            total += cross_entropy(logits, part[ahead:], reduction="sum").double().item()
            count += part.numel() - ahead
    return math.exp(total / count) if count else math.nan


def unigram_perplexity(train_stream: torch.Tensor, stream: torch.Tensor) -> float:
    """Perplexity of token frequencies in the training stream, each count plus one."""
    counts = torch.bincount(train_stream, minlength=VOCABULARY).double() + 1
    return math.exp(-(counts / counts.sum()).log()[stream].mean().item())


@torch.inference_mode()
def greedy(logits_of: Logits, tokenizer: Tokenizer, prompt: str, tokens: int) -> str:
    ids = tokenizer.encode(prompt).ids
    for _ in range(tokens):
        ids.append(int(logits_of(torch.tensor([ids]))[0, -1].argmax()))
    return str(tokenizer.decode(ids))


def measurements(
    logits_of: Logits, tokenizer: Tokenizer, texts: Texts, streams: Streams, steps: int
) -> dict[str, object]:
    """What both scripts print about a trained model."""
    windows = {str(window): perplexity(logits_of, streams.heldout, window) for window in (256, 512, 2048)}
    return {
        "steps": steps,
        "training_tokens": streams.training.numel(),
        "epochs": steps * TOKENS_PER_STEP / streams.training.numel(),
        "heldout_tokens": streams.heldout.numel(),
        "heldout_perplexity_by_window": windows,
        "heldout_unigram_perplexity": unigram_perplexity(streams.training, streams.heldout),
        "greedy_sample": greedy(logits_of, tokenizer, texts.heldout[:160].rsplit(" ", 1)[0], 60),
    }


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


# --- the Hugging Face folder ---


def write_folder(
    folder: Path, config: Mapping[str, object], tokenizer: Tokenizer, state: Mapping[str, torch.Tensor]
) -> None:
    """Write configs, tokenizer and weights; `config` lacks only what is the same for every model here."""
    folder.mkdir(parents=True, exist_ok=True)
    common: dict[str, object] = {
        "dtype": "bfloat16",
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "rope_theta": ROPE_THETA,  # older readers look only here
        "use_cache": True,
    }
    _write_json(folder / "config.json", {**config, **common})
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
    weights = folder / "model.safetensors"
    save_file(dict(sorted(state.items())), str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)  # it comes out readable by its owner alone, and a wheel would keep that


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8", newline="\n")
