"""A model whose weights are not here yet: names, shapes and dtypes from config.json, and no data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from qwen_quantize.checkpoint.json_file import read_object
from qwen_quantize.checkpoint.layouts import DEEPSEEK_FP8, BlockFp8Config, parse_quantization
from qwen_quantize.checkpoint.local_files import contained_file, find_side_files
from qwen_quantize.checkpoint.next_token import next_token_tensors, repeated_tensors
from qwen_quantize.checkpoint.safetensors_folder import MAX_CONFIG_BYTES, SINGLE_FILE, MissingWeights
from qwen_quantize.checkpoint.tensor_info import TensorInfo, storage_bits
from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import Blueprint
from qwen_quantize.models.lookup import require_blueprint

_STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_CORRECTION_BIAS = "e_score_correction_bias"  # stored as float32, whatever the dtype of the model


class PlannedSource:
    """What a folder will hold when its shards have been downloaded.

    Names, shapes and dtypes follow from config.json; where the folder has an index, only names in it count,
    and those that the model's blueprint does not know are left out and counted in `notes`. Reading raises
    UserError.
    """

    kind = "planned"

    def __init__(self, folder: Path, missing: MissingWeights) -> None:
        self.path = folder
        self.missing_files = missing.files
        self.config: dict[str, Any] = read_object(
            contained_file(folder, "config.json"), MAX_CONFIG_BYTES, allow_infinite=True
        )
        self._weight_map = missing.weight_map
        blueprint = require_blueprint(self.config)
        quantization = parse_quantization(self.config)
        if quantization is not None and not isinstance(quantization, BlockFp8Config):
            raise UserError(
                f"{folder} lacks {self._shards()}, and what a checkpoint with {quantization.describe()} holds cannot "
                "be foretold from its config.json; download the model first"
            )
        self._quantization: BlockFp8Config | None = quantization
        self._tensors: dict[str, TensorInfo] = {}
        self._add_all(blueprint)
        self.notes = self._make_notes()

    @property
    def lossy_types(self) -> tuple[str, ...]:
        return ()

    def _shards(self) -> str:
        first, count = self.missing_files[0], len(self.missing_files)
        return first if count == 1 else f"{count} shards, {first} the first of them"

    def _make_notes(self) -> tuple[str, ...]:
        notes = [f"{self.path} lacks {self._shards()}; names and shapes are those that config.json foretells"]
        unknown = [name for name in self._weight_map or () if name not in self._tensors]
        if unknown:
            notes.append(
                f"{len(unknown)} of {len(self._weight_map or ())} tensors in the index have a shape that "
                f"config.json does not tell, {unknown[0]!r} the first of them; they are left out of this plan"
            )
        return tuple(notes)

    def _add_all(self, blueprint: Blueprint) -> None:
        dtype = _STORED.get(blueprint.config.dtype, "BF16")
        linears = blueprint.linear_modules() | blueprint.next_token_modules()
        tensors: dict[str, tuple[int, ...]] = dict(blueprint.expected_tensors())
        for layer in blueprint.next_token_layers:
            tensors |= next_token_tensors(blueprint, layer) | repeated_tensors(blueprint, layer)
        tensors |= {f"{module}.weight": shape for module, shape in blueprint.next_token_modules().items()}
        for name, shape in tensors.items():
            module = name.removesuffix(".weight")
            if module in linears and self._is_fp8(module):
                self._add(name, DEEPSEEK_FP8.weight_dtype, shape)
                grid = DEEPSEEK_FP8.scale_shape(linears[module], self._block())
                self._add(DEEPSEEK_FP8.scale_name(module), DEEPSEEK_FP8.scale_dtype, grid)
            else:
                self._add(name, "F32" if name.endswith(_CORRECTION_BIAS) else dtype, shape)

    def _block(self) -> tuple[int, int]:
        assert self._quantization is not None
        return self._quantization.block

    def _is_fp8(self, module: str) -> bool:
        if self._quantization is None:
            return False
        if self._weight_map is not None:
            return DEEPSEEK_FP8.scale_name(module) in self._weight_map
        # A kept name stands for a module, for all inside it, or for the last parts of its name.
        return not any(
            module == kept or module.startswith(f"{kept}.") or module.endswith(f".{kept}")
            for kept in self._quantization.kept_modules
        )

    def _add(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        if self._weight_map is not None and name not in self._weight_map:
            return
        file = self.path / (SINGLE_FILE if self._weight_map is None else self._weight_map[name])
        nbytes = storage_bits(dtype, shape) // 8
        self._tensors[name] = TensorInfo(name, dtype, shape, nbytes, file)

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise UserError(f"{self.path} has no tensor {name!r}")
        return self._tensors[name]

    def read(self, name: str) -> Tensor:
        self._refuse(name)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:  # noqa: ARG002
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise UserError(
            f"{self.path}: tensor {name!r} cannot be read, for the folder lacks {self._shards()}; download "
            "the model first"
        )

    def read_once(self) -> PlannedSource:
        return self

    def side_files(self) -> Mapping[str, bytes | Path]:
        return find_side_files(self.path)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for part in (self.config, self._weight_map):
            text = json.dumps(part, sort_keys=True).encode()
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text)
        return digest.hexdigest()
