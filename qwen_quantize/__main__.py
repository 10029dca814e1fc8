"""`python -m qwen_quantize`."""

from qwen_quantize.cli.main import main

main()
