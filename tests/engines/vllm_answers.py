"""Run by vLLM's own interpreter: what it answers to prompts from model folders, as JSON.

    python vllm_answers.py REQUEST.json ANSWERS.json

REQUEST: folders (name -> path), float32 (the names of those to compute in it; the others take bfloat16), prompts
(token ids), new_tokens. ANSWERS: for each name a list with `tokens`, the
greedy continuation, and `log_probabilities` of each prompt token after the first; or `error`, a sentence.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def answers(folder: str, dtype: str, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.inputs import TokensPrompt

    length = max(map(len, prompts)) + new_tokens
    model = LLM(
        model=folder,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=length,
        max_num_seqs=len(prompts),
        skip_tokenizer_init=True,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens, prompt_logprobs=0, detokenize=False)
    found = model.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], greedy)
    del model
    cleanup_dist_env_and_memory()
    return [
        {
            "tokens": list(one.outputs[0].token_ids),
            "log_probabilities": [
                place[token].logprob for token, place in zip(prompt[1:], one.prompt_logprobs[1:], strict=True)
            ],
        }
        for prompt, one in zip(prompts, found, strict=True)
    ]


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    found: dict[str, Any] = {}
    for name, folder in request["folders"].items():
        try:
            dtype = "float32" if name in request["float32"] else "bfloat16"
            found[name] = answers(folder, dtype, request["prompts"], request["new_tokens"])
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
