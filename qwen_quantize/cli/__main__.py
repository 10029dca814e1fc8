"""`python -m qwen_quantize.cli`."""

from qwen_quantize.__main__ import main

main()
