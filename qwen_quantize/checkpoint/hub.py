"""Fetching a model from the Hugging Face hub: weights as safetensors and side files, never code."""

from __future__ import annotations

import re
from pathlib import Path

from qwen_quantize.errors import UserError

_WEIGHTS = "*.safetensors"
ALLOWED_FILES = (_WEIGHTS, "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*")
# Sub-folders and `consolidated` files hold the same weights again in a publisher's own layout.
IGNORED_FILES = ("*/*", "consolidated*")

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form of a hub id, `organisation/model`."""
    return _HUB_ID.fullmatch(text) is not None and ".." not in text and "--" not in text


def download(hub_id: str, *, weights: bool = True) -> Path:
    """The local folder of a hub model, downloaded where the cache lacks it; UserError if it cannot be had.

    weights: False leaves the shards out, which a plan does not need.
    """
    from huggingface_hub import snapshot_download

    # HTTPError is that of whichever HTTP library the hub client was built on.
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
    )

    tried = f"there is no local folder {hub_id!r}, and the hub"
    wanted = [pattern for pattern in ALLOWED_FILES if weights or pattern != _WEIGHTS]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted, ignore_patterns=list(IGNORED_FILES)))
    except GatedRepoError as error:
        raise UserError(
            f"{tried} model {hub_id!r} is gated; accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(f"{tried} has no model {hub_id!r} either; check the spelling") from error
    except (OSError, HTTPError) as error:
        # huggingface_hub reports a missing network and a missing cache entry as kinds of OSError.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{tried} could not be reached for {hub_id!r} ({reason[0]:.160}); give the path of a local "
            "model, or run again with a network"
        ) from error
