"""Measures of what a quantized model is worth."""
