"""What a chip's cast takes from its input on average, given back in the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.calibrators.observers import InputStatistics

_PRIOR_TOKENS = 256.0  # a feature's own gain counts as much as its input's common one after so many tokens


def column_gain(statistics: InputStatistics) -> Tensor | None:
    """[K] float32: g that minimises E w (x - g Q(x))^2, for each input feature; None without second moments.

    A truncating cast shrinks every value, by about four per cent in E4M3, and W diag(g) makes up for it: the
    least squares of W x on Q(x), restricted to a diagonal. The full solution, W E[x Q^T] E[Q Q^T]^-1, has K
    times as many parameters and overfits on a few thousand tokens. Each feature's gain is drawn toward the
    common one of all features as if that had been seen on 256 tokens. A cast to nearest gives gains within a
    thousandth of 1, and a feature that never fired gets 1.
    """
    if not statistics.second_moments or statistics.tokens == 0:
        return None
    diagonal = [moment.diagonal() for moment in statistics.second_moments]
    squares = torch.cat(diagonal)
    total = float(squares.sum())
    if total <= 0:
        return None
    common = float(statistics.cross.sum()) / total
    own = statistics.tokens / (statistics.tokens + _PRIOR_TOKENS)
    gain = own * statistics.cross / squares + (1 - own) * common
    return torch.where(squares > 0, gain, 1.0).float()
