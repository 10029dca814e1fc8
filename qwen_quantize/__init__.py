"""Quantize and calibrate large language models for AI chips under each chip's own arithmetic."""

__version__ = "0.1.0"
