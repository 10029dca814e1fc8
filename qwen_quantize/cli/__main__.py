"""`python -m qwen_quantize.cli`."""

from qwen_quantize.cli.main import main

main()
