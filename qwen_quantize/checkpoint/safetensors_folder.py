"""A Hugging Face model folder with safetensors, one file or shards with an index."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.checkpoint.ascend_description import DESCRIPTION_FILE, MAX_DESCRIPTION_BYTES
from qwen_quantize.checkpoint.direct_io import LEAST_BYTES, read_range
from qwen_quantize.checkpoint.json_file import read_object
from qwen_quantize.checkpoint.local_files import contained_file, find_side_files, is_plain_name
from qwen_quantize.checkpoint.positioned_reads import PositionedReads
from qwen_quantize.checkpoint.safetensors_header import SafetensorsHeader, StoredTensor, read_header
from qwen_quantize.checkpoint.tensor_info import DTYPES, TensorInfo, torch_shape
from qwen_quantize.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 16_000_000
MAX_INDEX_BYTES = 256_000_000  # a model of 100,000 tensors has an index of about 10 MB

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class SafetensorsFolder:
    """A checkpoint in a folder. Every header is validated when it is opened; data is read on demand.

    Data is read by position into fresh memory and never mapped: a map would count as resident memory, and
    a file that is cut while it is mapped would kill the process. description: of msModelSlim's file beside
    config.json, None where there is none.
    """

    kind = "safetensors"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        try:
            present = sorted(entry.name for entry in folder.iterdir())
        except OSError as error:
            raise UserError(f"{folder} cannot be listed: {error.strerror}") from error
        if "config.json" not in present:
            raise UserError(f"{folder} has no config.json, so it is no model folder; give the one that has")
        self.config: dict[str, Any] = read_object(
            contained_file(folder, "config.json"), MAX_CONFIG_BYTES, allow_infinite=True
        )
        self.description: dict[str, Any] | None = None
        if DESCRIPTION_FILE in present:
            self.description = read_object(contained_file(folder, DESCRIPTION_FILE), MAX_DESCRIPTION_BYTES)
        self._headers, self._tensors = _open_shards(folder, present)
        self._files = PositionedReads()
        self._once = False

    @property
    def lossy_types(self) -> tuple[str, ...]:
        return ()

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def info(self, name: str) -> TensorInfo:
        return self._find(name).info

    def _find(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise UserError(f"{self.path} has no tensor {name!r}")
        return self._tensors[name]

    def read(self, name: str) -> Tensor:
        stored = self._find(name)
        info = stored.info
        return _as_tensor(self._read_bytes(stored, 0, info.nbytes), info, torch_shape(info.dtype, info.shape))

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        stored = self._find(name)
        info = stored.info
        if not info.shape or not 0 <= start <= stop <= info.shape[0]:
            raise ValueError(f"rows [{start}, {stop}) do not exist in {name!r} of shape {list(info.shape)}")
        row_bits = info.nbytes * 8 // info.shape[0] if info.shape[0] else 0
        if row_bits % 8:
            raise ValueError(f"the rows of {name!r} ({info.dtype} {list(info.shape)}) are no whole bytes")
        row_bytes = row_bits // 8
        data = self._read_bytes(stored, start * row_bytes, (stop - start) * row_bytes)
        return _as_tensor(data, info, torch_shape(info.dtype, (stop - start, *info.shape[1:])))

    def read_into(self, name: str, skip: int, buffer: Tensor) -> None:
        """Fill `buffer`, contiguous uint8 on the CPU, with the tensor's stored bytes from byte `skip` on.

        Nothing of the tensor's size is allocated, and several threads may read at once. ValueError where the
        buffer is of another kind or reaches past the tensor; UserError as for `read`.
        """
        stored = self._find(name)
        if buffer.dtype != torch.uint8 or buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError(f"the buffer must be contiguous uint8 on the CPU, not {buffer.dtype}")
        if not 0 <= skip <= skip + buffer.numel() <= stored.info.nbytes:
            raise ValueError(
                f"bytes [{skip}, {skip + buffer.numel()}) do not exist in {name!r} of {stored.info.nbytes} bytes"
            )
        self._fill(stored, skip, buffer)

    def read_once(self) -> SafetensorsFolder:
        """The same checkpoint for a reader that needs each byte once: large reads leave the page cache as it is."""
        other = copy.copy(self)
        other._once = True
        return other

    def _read_bytes(self, stored: StoredTensor, skip: int, nbytes: int) -> Tensor:
        if not self._once or nbytes < LEAST_BYTES:
            data = torch.empty(nbytes, dtype=torch.uint8)
            self._fill(stored, skip, data)
            return data
        with self._named_errors(stored):
            data, done = read_range(stored.info.file, stored.begin + skip, nbytes)
        self._require(stored, skip, nbytes, done)
        return data

    def _fill(self, stored: StoredTensor, skip: int, buffer: Tensor) -> None:
        with self._named_errors(stored):
            view = buffer.view(-1).numpy().data
            done = self._files.read_into(stored.info.file, stored.begin + skip, view)
        self._require(stored, skip, buffer.numel(), done)

    @contextmanager
    def _named_errors(self, stored: StoredTensor) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            info = stored.info
            raise UserError(f"{info.file}: tensor {info.name!r} cannot be read: {error.strerror}") from error

    def _require(self, stored: StoredTensor, skip: int, nbytes: int, done: int) -> None:
        info = stored.info
        if done < nbytes:
            raise UserError(
                f"{info.file}: tensor {info.name!r} ends after {skip + done} of its {info.nbytes} bytes: the "
                "file was cut since it was opened; download it again"
            )

    def side_files(self) -> Mapping[str, bytes | Path]:
        return find_side_files(self.path)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        digest.update(json.dumps(self.config, sort_keys=True).encode())
        if self.description is not None:
            digest.update(json.dumps(self.description, sort_keys=True).encode())
        for header in self._headers:
            for part in (header.file.name.encode(), str(header.file_bytes).encode(), header.raw):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        return digest.hexdigest()


def _as_tensor(data: Tensor, info: TensorInfo, shape: tuple[int, ...]) -> Tensor:
    dtype = DTYPES[info.dtype].torch
    if dtype is None:
        raise UserError(f"{info.file}: tensor {info.name!r} is {info.dtype}, which torch has no dtype for")
    return data.view(dtype).view(shape)


def _open_shards(
    folder: Path, present: list[str]
) -> tuple[tuple[SafetensorsHeader, ...], dict[str, StoredTensor]]:
    """The headers in file order and all tensors by name; what the index says is held against the headers."""
    weight_map: dict[str, str] | None = None
    single, index = _weight_files(folder, present)
    if index in present:
        weight_map = _read_index(folder, index)
        files = sorted(set(weight_map.values()))
        if single in present and files != [single]:
            raise UserError(
                f"{folder} holds both {single} and {index}, which lists other files; remove the "
                "one that is left over"
            )
    elif single in present:
        files = [single]
    else:
        raise UserError(_no_weights(folder, present))
    headers = tuple(read_header(contained_file(folder, name)) for name in files)
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        for name, stored in sorted(header.tensors.items(), key=lambda item: item[1].begin):
            if name in tensors:
                raise UserError(
                    f"{folder}: tensor {name!r} is in two shards, {tensors[name].info.file.name} and "
                    f"{header.file.name}; download the model again"
                )
            tensors[name] = stored
    for name, file in (weight_map or {}).items():
        if name not in tensors or tensors[name].info.file.name != file:
            raise UserError(
                f"{folder / index} lists tensor {name!r} in {file}, which does not hold it; "
                "download the model again"
            )
    if not tensors:
        raise UserError(f"{folder} holds no tensors; download the model again")
    return headers, tensors


def _weight_files(folder: Path, present: list[str]) -> tuple[str, str]:
    """(the one file of weights, the index of several), by their usual names or by those of an Ascend checkpoint.

    msModelSlim's older versions put the type into the names, so that there they are found by their endings.
    """
    if DESCRIPTION_FILE not in present:
        return SINGLE_FILE, INDEX_FILE
    ending = ".safetensors.index.json"
    stems = [name.removesuffix(ending) for name in present if name.endswith(ending)]
    stems = stems or [name.removesuffix(".safetensors") for name in present if name.endswith(".safetensors")]
    if len(stems) > 1:
        raise UserError(
            f"{folder} holds weights or indices of {' and '.join(map(repr, stems[:3]))} beside {DESCRIPTION_FILE}; "
            "one set is left over from another model, remove it"
        )
    stem = stems[0] if stems else "model"
    return f"{stem}.safetensors", f"{stem}{ending}"


def _read_index(folder: Path, name: str = INDEX_FILE, *, may_be_missing: bool = False) -> dict[str, str]:
    """The `weight_map`, tensor to plain file name. Its total size is not trusted and not used."""
    path = contained_file(folder, name)
    weight_map = read_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path} must map tensors to files under 'weight_map', found {weight_map!r:.80}")
    checked: set[str] = set()  # a big model has a hundred thousand tensors in a few hundred files
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise UserError(f"{path}: tensor {name!r} must name its file, found {file!r:.80}")
        if file in checked:
            continue
        checked.add(file)
        if may_be_missing and is_plain_name(file) and not (folder / file).exists():
            continue
        try:
            contained_file(folder, file)
        except UserError as error:
            raise UserError(f"{path}: tensor {name!r} is in {file!r}, and {error}") from error
    return weight_map


@dataclass(frozen=True, slots=True)
class MissingWeights:
    """Shards that a folder should hold and does not; weight_map: what its index says, None without one."""

    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None


def find_missing_weights(folder: Path) -> MissingWeights | None:
    """The shards that are still to be downloaded, None where no one is missing.

    A folder with an index lacks those of its files that are not there, and one without any weights lacks
    `model.safetensors`; weights of another kind, such as pickles, count as weights.
    """
    try:
        present = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        raise UserError(f"{folder} cannot be listed: {error.strerror}") from error
    if INDEX_FILE in present and DESCRIPTION_FILE not in present:
        weight_map = _read_index(folder, may_be_missing=True)
        files = tuple(sorted(set(weight_map.values()) - present))
        return MissingWeights(files, weight_map) if files else None
    weights = (*_PICKLES, "*.safetensors", "*.gguf")
    if "config.json" in present and not any(fnmatch(name, kind) for name in present for kind in weights):
        return MissingWeights((SINGLE_FILE,), None)
    return None


def _no_weights(folder: Path, present: list[str]) -> str:
    pickles = [name for name in present if any(fnmatch(name, pattern) for pattern in _PICKLES)]
    if pickles:
        return (
            f"{folder} holds its weights as pickles ({', '.join(pickles[:3])}), which are never loaded: they "
            "can run any code; if you trust them, convert them with from_pretrained and save_pretrained of "
            "transformers"
        )
    shards = [name for name in present if name.endswith(".safetensors")]
    if shards:
        return f"{folder} has {shards[0]} but no {INDEX_FILE} that lists its files; download the model again"
    gguf = [name for name in present if name.endswith(".gguf")]
    if gguf:
        return f"{folder} has no safetensors, but {gguf[0]}; give the path of that file"
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; download the model again"
