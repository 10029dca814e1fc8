"""Runs inside llama.cpp's own environment: greedy continuations of texts and what the model thought of each token.

Arguments: a GGUF and the number of tokens. stdin: {"prompts": [texts], "banned": [ids]}; stdout: {"answers":
[{"prompt_tokens", "ids", "logprobs"}]}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import xllamacpp


def main() -> None:
    """Answer on stdout; llama.cpp itself talks on stderr."""
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 512, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    server = xllamacpp.Server(params)
    answers, job = [], json.load(sys.stdin)
    banned = {"logit_bias": [[number, False] for number in job["banned"]]}
    for prompt in job["prompts"]:
        request = {"prompt": prompt, "n_predict": int(sys.argv[2]), "temperature": 0.0, "logprobs": 1}
        found: dict[str, Any] = server.handle_completions(
            request | banned | {"ignore_eos": True, "cache_prompt": False}
        )
        content = found["choices"][0]["logprobs"]["content"]
        answers.append(
            {
                "prompt_tokens": found["usage"]["prompt_tokens"],
                "ids": [one["id"] for one in content],
                "logprobs": [one["logprob"] for one in content],
            }
        )
    json.dump({"answers": answers}, sys.stdout)
    sys.stdout.flush()  # the server ends the process in its own way


if __name__ == "__main__":
    main()
