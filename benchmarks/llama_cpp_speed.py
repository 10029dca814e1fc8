"""One timed run of llama.cpp in an environment of its own: lines of prompt ids and counts in, lines of seconds out.

    python llama_cpp_speed.py MODEL.gguf THREADS

Each line of stdin is a JSON object {"prompt": [...], "new": N}; each of stdout {"prefill": s, "decode": s}.
"""

from __future__ import annotations

import json
import sys
import time

from llama_cpp import Llama, llama_print_system_info

model = Llama(
    sys.argv[1],
    n_ctx=512,
    n_batch=512,
    n_threads=int(sys.argv[2]),
    n_threads_batch=int(sys.argv[2]),
    verbose=False,
)
print(json.dumps({"build": llama_print_system_info().decode().strip()}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    model.reset()
    begin = time.perf_counter()
    model.eval(asked["prompt"])
    middle = time.perf_counter()
    for _ in range(asked["new"]):
        model.eval([5])  # which token it is takes no part in the time, nor does choosing one
    print(json.dumps({"prefill": middle - begin, "decode": time.perf_counter() - middle}), flush=True)
