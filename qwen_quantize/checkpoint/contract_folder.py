"""A model folder as `check` sees it: whatever can be read is read, whatever cannot is a finding.

The readers of the other commands stop at the first fault; here every fault is to be found, so this one goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.checkpoint.ascend_description import DESCRIPTION_FILE as DESCRIPTION
from qwen_quantize.checkpoint.finding import Finding, warning
from qwen_quantize.checkpoint.json_file import read_object
from qwen_quantize.checkpoint.local_files import contained_file, is_plain_name
from qwen_quantize.checkpoint.positioned_reads import PositionedReads
from qwen_quantize.checkpoint.safetensors_folder import MAX_CONFIG_BYTES, MAX_INDEX_BYTES
from qwen_quantize.checkpoint.safetensors_header import StoredTensor, read_header
from qwen_quantize.checkpoint.tensor_info import DTYPES, TensorInfo, torch_shape
from qwen_quantize.errors import UserError

# The weights in one file, and the index of several, as Hugging Face's and as Ascend's tools name them.
WEIGHT_NAMES = {
    "model.safetensors": "model.safetensors.index.json",
    "quant_model_weights.safetensors": "quant_model_weights.safetensors.index.json",
}
_AGAIN = "write or download the folder again"


class ModelFolder:
    """Names, config, tensors and the findings that opening made; data is read on demand.

    description: Ascend's `quant_model_description.json`, None without one. files: the plain names in the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.findings: list[Finding] = []
        if not path.is_dir():
            raise UserError(f"there is no folder {str(path)!r} to check; give the path of a model folder")
        try:
            entries = sorted(path.iterdir())
        except OSError as error:
            raise UserError(f"{path} cannot be listed: {error.strerror}") from error
        self.files = frozenset(entry.name for entry in entries if is_plain_name(entry.name))
        if "config.json" not in self.files:
            raise UserError(f"{path} has no config.json, so it is no model folder; give the one that has")
        self.config: Mapping[str, Any] = read_object(
            contained_file(path, "config.json"), MAX_CONFIG_BYTES, allow_infinite=True
        )
        self.description = self.json_file(DESCRIPTION) if DESCRIPTION in self.files else None
        self.tensors: dict[str, StoredTensor] = {}
        self._total: int | None = None
        self._reads = PositionedReads()
        self._open_weights()
        self.modules = _by_module(self.tensors)

    def say(self, error: UserError) -> str:
        """The error's words without the folder's own path, which differs between a run's staging and its end."""
        text = str(error)
        for place in (str(self.path.resolve()), str(self.path)):
            text = text.replace(f"{place}/", "").replace(place, "the folder")
        return text

    def json_file(self, name: str, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any] | None:
        """The object in a JSON file of the folder; None, with a finding, where it cannot be read."""
        try:
            return read_object(contained_file(self.path, name), limit)
        except UserError as error:
            self.findings.append(Finding(name, "json-file", self.say(error), _AGAIN))
            return None

    def info(self, name: str) -> TensorInfo | None:
        found = self.tensors.get(name)
        return None if found is None else found.info

    def read(self, name: str, limit: int | None = None) -> Tensor | None:
        """The tensor, or its first `limit` bytes as uint8; None where it is cut or torch has no dtype for it."""
        stored = self.tensors[name]
        info = stored.info
        dtype = DTYPES[info.dtype].torch
        data = torch.empty(info.nbytes if limit is None else min(limit, info.nbytes), dtype=torch.uint8)
        try:
            done = self._reads.read_into(info.file, stored.begin, data.numpy().data)
        except OSError:
            done = -1
        if done != data.numel() or dtype is None:
            return None
        return data if limit is not None else data.view(dtype).view(torch_shape(info.dtype, info.shape))

    def _open_weights(self) -> None:
        shards = {name for name in self.files if name.endswith(".safetensors")}
        indexes = [index for index in WEIGHT_NAMES.values() if index in self.files]
        weight_map: dict[str, str] | None = None
        if len(indexes) > 1:
            self.findings.append(
                Finding(
                    indexes[0],
                    "index-stale",
                    f"two indexes are there, {indexes[0]} and {indexes[1]}; engines take the first and load other "
                    "shards than those of the second",
                    "remove the index that does not belong to these weights",
                )
            )
        if indexes:
            weight_map = self._read_index(indexes[-1])
        listed = shards if weight_map is None else set(weight_map.values())
        if weight_map is None and not indexes and len(shards) > 1:
            self.findings.append(
                Finding(
                    sorted(shards)[0],
                    "index-missing",
                    f"{len(shards)} shards have no index; transformers does not find them",
                    "write model.safetensors.index.json, or merge the shards into model.safetensors",
                )
            )
        elif weight_map is None and not indexes and shards and not shards & WEIGHT_NAMES.keys():
            self.findings.append(
                Finding(
                    sorted(shards)[0],
                    "shard-name",
                    "the only file of weights is not called model.safetensors; transformers does not find it",
                    "rename it to model.safetensors",
                )
            )
        if not shards and not listed:
            self.findings.append(
                Finding(
                    "model.safetensors",
                    "weights-missing",
                    "there are no safetensors; no engine has anything to load",
                    _AGAIN,
                )
            )
        for name in sorted(shards - listed):
            self.findings.append(
                Finding(
                    name,
                    "shard-unreferenced",
                    "the index does not name this file; vLLM and SGLang read every safetensors file of a folder and "
                    "may load its tensors over the right ones",
                    "remove the file, or write the index anew",
                )
            )
        for name in sorted(listed):
            self._open_shard(name, weight_map)
        if weight_map is not None:
            self._compare_index(indexes[-1], weight_map)

    def _read_index(self, name: str) -> dict[str, str] | None:
        found = self.json_file(name, MAX_INDEX_BYTES)
        if found is None:
            return None
        weight_map = found.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            self.findings.append(
                Finding(
                    name,
                    "index-map",
                    "'weight_map' does not map tensors to files; engines stop at it",
                    "write the index anew",
                )
            )
            return None
        checked: dict[str, str] = {}
        hostile: set[str] = set()
        for tensor, file in weight_map.items():
            if isinstance(file, str) and is_plain_name(file) and file.endswith(".safetensors"):
                checked[tensor] = file
            elif str(file) not in hostile:
                hostile.add(str(file))
                self.findings.append(
                    Finding(
                        tensor,
                        "index-name",
                        f"{name} puts this tensor into {str(file)[:80]!r}, which is no plain name of a safetensors "
                        "file in the folder; a loader that follows it reads outside the folder",
                        "do not use this folder unless you know where it comes from; write the index anew",
                    )
                )
        metadata = found.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        self._total = total if type(total) is int else None
        return checked

    def _open_shard(self, name: str, weight_map: Mapping[str, str] | None) -> None:
        if name not in self.files:
            tensor = next((key for key, file in (weight_map or {}).items() if file == name), name)
            self.findings.append(
                Finding(
                    name,
                    "shard-missing",
                    f"the index names this file, for {tensor!r} among others, and it is not there; engines stop, or "
                    "leave those weights at random values",
                    "download or write the file again",
                )
            )
            return
        try:
            header = read_header(contained_file(self.path, name))
        except UserError as error:
            self.findings.append(Finding(name, "header", f"{self.say(error)}; no engine opens it", _AGAIN))
            return
        for tensor, stored in header.tensors.items():
            if tensor in self.tensors:
                self.findings.append(
                    Finding(
                        tensor,
                        "tensor-twice",
                        f"the tensor is in {self.tensors[tensor].info.file.name} and in {name}; which one an engine "
                        "takes depends on the order of its files",
                        "remove the file that is left over, or write the folder again",
                    )
                )
            self.tensors[tensor] = stored

    def _compare_index(self, index: str, weight_map: Mapping[str, str]) -> None:
        for tensor, file in weight_map.items():
            stored = self.tensors.get(tensor)
            if stored is None and file in self.files:
                self.findings.append(
                    Finding(
                        tensor,
                        "index-tensor",
                        f"{index} says the tensor is in {file}, which does not hold it; transformers leaves it at "
                        "random values, others stop",
                        "write the index anew from the shards",
                    )
                )
            elif stored is not None and stored.info.file.name != file:
                self.findings.append(
                    Finding(
                        tensor,
                        "index-tensor",
                        f"{index} says the tensor is in {file}, and it is in {stored.info.file.name}; vLLM skips it "
                        "as a duplicate",
                        "write the index anew from the shards",
                    )
                )
        left_out = [tensor for tensor in self.tensors if tensor not in weight_map]
        for tensor in left_out[:8]:
            self.findings.append(
                Finding(
                    tensor,
                    "index-incomplete",
                    f"{self.tensors[tensor].info.file.name} holds the tensor and {index} does not list it "
                    f"({len(left_out)} such tensors); transformers and vLLM skip it",
                    "write the index anew from the shards",
                )
            )
        stored_bytes = sum(stored.info.nbytes for stored in self.tensors.values())
        if self._total is not None and self._total != stored_bytes:
            self.findings.append(
                warning(
                    index,
                    "index-total",
                    f"total_size says {self._total} bytes and the shards hold {stored_bytes}; the index is of "
                    "another "
                    "write than they, and engines that plan memory by it plan wrongly",
                    "write the index anew from the shards",
                )
            )


def _by_module(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Module -> the last parts of its tensors' names, in order."""
    found: dict[str, list[str]] = {}
    for name in names:
        module, _, suffix = name.rpartition(".")
        found.setdefault(module, []).append(suffix)
    return {module: tuple(suffixes) for module, suffixes in found.items()}


def whole_number(value: object) -> int | None:
    """A positive whole number of a config, None for anything else (True is none)."""
    return value if type(value) is int and 0 < value < 1 << 31 else None


def shown_json(value: object) -> str:
    """A value from a file, short enough for a sentence."""
    try:
        return json.dumps(value, ensure_ascii=False)[:80]
    except (TypeError, ValueError):
        return repr(value)[:80]
