"""Solvers and transforms that choose the quantized weights; pure functions of tensors."""
