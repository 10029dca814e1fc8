"""Train the small DeepSeek-V3-style language model that ships in the package.

    nice python tools/train_embedded_moe.py [--deb FILE] [--output FOLDER] [--threads 2]
    python tools/train_embedded_moe.py --steps 20 --text TRAIN.txt --heldout HELDOUT.txt --output FOLDER

The second form is for a smoke run. The tokenizer is the dense model's (tools/train_embedded.py).

Multi-head latent attention, one dense layer, then layers of 16 routed experts and a shared one, and one layer
that predicts the token after the next (MTP). Architecture, the MTP loss and the balancing of the experts
without an auxiliary loss follow DeepSeek-V3 (arXiv 2412.19437, sections 2.1 and 2.2); so do the names of the
tensors on disk. The texts are those of the dense model. Seeds are fixed: the same texts, library versions and
thread count give the same bytes. Prints one JSON document with sizes, perplexities and the experts' shares to
stdout.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3TopkRouter,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the root, from which its neighbours are imported

from tools.embedded_texts import EMBEDDED, EmbeddedTextError
from tools.embedded_training import (
    COMMON_FIELDS,
    END_OF_TEXT_ID,
    MAX_POSITIONS,
    ROPE_THETA,
    SEED,
    VOCABULARY,
    folder_bytes,
    measurements,
    optimize,
    options_parser,
    perplexity,
    read_texts,
    token_streams,
    write_folder,
)

CONFIG_FIELDS = (
    *COMMON_FIELDS,
    "first_k_dense_replace",
    "kv_lora_rank",
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_nextn_predict_layers",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rope_interleave",
    "routed_scaling_factor",
    "topk_group",
    "v_head_dim",
)
STEPS = 2000
NEXT_TOKEN_LOSS_WEIGHT = 0.3
# How far the bias of an expert moves after each step, against its load (the paper's gamma).
BALANCING_SPEED = 1e-3


def model_config() -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=1,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )


class NextTokenLayer(nn.Module):
    """One MTP layer; embedding and output head are the main model's."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.enorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.norm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Normed hidden states and the embeddings of the tokens after them, both [B, T, H], to [B, T, H]."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        normed: torch.Tensor = self.norm(self.block(joined, position_embeddings=rotary))
        return normed


class Balancer:
    """Counts how many tokens each expert gets, and moves the routers' biases toward balance."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = [part for part in model.modules() if isinstance(part, DeepseekV3TopkRouter)]
        self.loads = torch.zeros(len(self.routers), self.routers[0].num_experts, dtype=torch.int64)
        for load, router in zip(self.loads, self.routers, strict=True):
            router.register_forward_hook(lambda _part, _x, routed, load=load: self._count(routed[2], load))

    @staticmethod
    def _count(indices: torch.Tensor, load: torch.Tensor) -> None:
        load += torch.bincount(indices.flatten(), minlength=load.numel())

    def step(self) -> None:
        """One step of the auxiliary-loss-free balancing; the counts start again."""
        for load, router in zip(self.loads, self.routers, strict=True):
            toward = torch.sign(load.double().mean() - load).float()
            router.e_score_correction_bias += BALANCING_SPEED * toward
        self.loads.zero_()

    def shares(self) -> torch.Tensor:
        """Each expert's share of its layer's assignments since the last step: float64 [layers, experts]."""
        return self.loads / self.loads.sum(dim=1, keepdim=True).double()


class EmbeddedMoe(nn.Module):
    """The language model and its MTP layer."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.main = DeepseekV3ForCausalLM(config)
        self.next_token = NextTokenLayer(config)
        # transformers initialises its own model; the layer here gets the same distribution.
        self.next_token.apply(self.main._init_weights)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [B, T] to logits [B, T, V] of the next token and [B, T - 1, V] of the one after it."""
        hidden = self.main.model(input_ids=ids).last_hidden_state
        embedded = self.main.model.embed_tokens(ids[:, 1:])
        rotary = self.main.model.rotary_emb(embedded, torch.arange(embedded.shape[1])[None])
        ahead = self.next_token(hidden[:, :-1], embedded, rotary)
        return self.main.lm_head(hidden), self.main.lm_head(ahead)


def train(stream: torch.Tensor, steps: int) -> tuple[EmbeddedMoe, Balancer]:
    """Train in float32 from a fixed seed and return the model with its weights rounded to bfloat16 values."""
    torch.manual_seed(SEED)  # transformers initialises from the global generator
    model = EmbeddedMoe(model_config())
    balancer = Balancer(model)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        following, ahead = model(batch[:, :-1])
        loss = cross_entropy(following.flatten(0, 1), batch[:, 1:].flatten())
        return loss + NEXT_TOKEN_LOSS_WEIGHT * cross_entropy(ahead.flatten(0, 1), batch[:, 2:].flatten())

    optimize(model, stream, steps, loss_of, balancer.step)
    return model, balancer


def tensors_on_disk(model: EmbeddedMoe) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values as DeepSeek-V3's checkpoint has them: one tensor per projection of every expert.

    All are bfloat16 but the routers' biases, which that checkpoint keeps in float32.
    """
    layer = f"model.layers.{model.main.config.num_hidden_layers}."
    named = list(model.main.state_dict().items())
    for name, tensor in model.next_token.state_dict().items():
        renamed = name.removeprefix("block.") if name.startswith("block.") else name
        named.append((layer + ("shared_head." + name if name == "norm.weight" else renamed), tensor))
    # The MTP layer shares embedding and head with the model; the checkpoint repeats them under its own names.
    named.append((layer + "embed_tokens.weight", model.main.model.embed_tokens.weight))
    named.append((layer + "shared_head.head.weight", model.main.lm_head.weight))
    for name, tensor in named:
        if name.endswith("e_score_correction_bias"):
            yield name, tensor
        elif name.endswith(".experts.gate_up_proj"):
            path = name.removesuffix("gate_up_proj")
            for expert, fused in enumerate(tensor.to(torch.bfloat16)):
                gate, up = fused.chunk(2)
                yield f"{path}{expert}.gate_proj.weight", gate
                yield f"{path}{expert}.up_proj.weight", up
        elif name.endswith(".experts.down_proj"):
            for expert, down in enumerate(tensor.to(torch.bfloat16)):
                yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", down
        else:
            yield name, tensor.to(torch.bfloat16)


def save(folder: Path, model: EmbeddedMoe, tokenizer: Tokenizer) -> None:
    config = model.main.config.to_dict()
    kept = {name: config[name] for name in CONFIG_FIELDS}
    # Fields of DeepSeek's own config class, which other readers ask for.
    kept |= {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    state = {name: tensor.detach().clone() for name, tensor in tensors_on_disk(model)}
    write_folder(folder, {**kept, "architectures": ["DeepseekV3ForCausalLM"]}, tokenizer, state)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_parser(__doc__, EMBEDDED / "moe", STEPS).parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)  # gathers add up their gradients in any order otherwise
    began = time.monotonic()
    try:
        texts = read_texts(options)
        tokenizer = Tokenizer.from_file(str(EMBEDDED / "dense" / "tokenizer.json"))
        streams = token_streams(tokenizer, texts)
    except (EmbeddedTextError, OSError) as error:
        print(f"train_embedded_moe: {error}", file=sys.stderr)
        return 2
    model, balancer = train(streams.training, options.steps)
    save(options.output, model, tokenizer)
    # The MTP layer is given the next token, so this is about as low as the model's own perplexity.
    ahead = perplexity(lambda ids: model(ids)[1], streams.heldout, 512, ahead=2)
    shares = balancer.shares()  # of that one pass over the held-out text
    record = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": folder_bytes(options.output),
        **measurements(lambda ids: model(ids)[0], tokenizer, texts, streams, options.steps),
        "heldout_perplexity_after_next": ahead,
        "expert_share_min_by_layer": [round(share, 5) for share in shares.amin(dim=1).tolist()],
        "expert_share_max_by_layer": [round(share, 5) for share in shares.amax(dim=1).tolist()],
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(record, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
