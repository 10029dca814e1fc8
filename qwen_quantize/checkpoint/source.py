"""What a checkpoint is to the rest of the program, whatever its files look like, and how one is opened."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from qwen_quantize.checkpoint.hub import download, is_hub_id
from qwen_quantize.checkpoint.local_files import contained_file
from qwen_quantize.checkpoint.safetensors_folder import SafetensorsFolder, find_missing_weights
from qwen_quantize.checkpoint.tensor_info import TensorInfo
from qwen_quantize.embedded import embedded_by_name
from qwen_quantize.errors import UserError


class CheckpointSource(Protocol):
    """Named tensors, a Hugging Face style config and the side files of a model; nothing is kept in memory.

    path: the folder or file; kind: "safetensors", "gguf" or "planned"; config: the object of config.json.
    """

    @property
    def path(self) -> Path: ...

    @property
    def kind(self) -> str: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def lossy_types(self) -> tuple[str, ...]:
        """Types of fewer than 16 bits that the file itself decodes, GGUF's; what config.json says is not here."""
        ...

    def names(self) -> tuple[str, ...]:
        """All tensor names, in the order of their files and offsets."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Raises UserError for a name that the checkpoint does not hold."""
        ...

    def read(self, name: str) -> Tensor:
        """The whole tensor in its own dtype, a fresh contiguous copy on the CPU."""
        ...

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along the first dimension, a fresh copy; ValueError outside the tensor."""
        ...

    def read_once(self) -> CheckpointSource:
        """The same checkpoint for a reader that needs each byte once, and so no page cache."""
        ...

    def side_files(self) -> Mapping[str, bytes | Path]:
        """The files beside the weights that serving needs: tokenizer, chat template, generation config."""
        ...

    def fingerprint(self) -> str:
        """A sha256 over config, headers and file sizes: cheap; it does not see a changed weight."""
        ...


def open_source(
    path: Path | str, *, allow_download: bool = True, allow_missing_weights: bool = False
) -> CheckpointSource:
    """Open a folder of safetensors, a `.gguf` file, a hub id such as `org/name`, or `embedded:moe`.

    Only a hub id that is no local path is looked for on the network, and only with `allow_download`. With
    `allow_missing_weights`, a folder whose shards are not all there opens as a `PlannedSource`, which has names
    and shapes but no data, and from the hub only the small files are fetched. Raises UserError for whatever
    cannot be opened.
    """
    local = embedded_by_name(str(path)) or Path(path).expanduser()
    if local.is_dir():
        return _open_folder(local, allow_missing_weights)
    if local.is_file():
        return _open_file(local)
    if is_hub_id(str(path)):
        if allow_download:
            return _open_folder(download(str(path), weights=not allow_missing_weights), allow_missing_weights)
        raise UserError(
            f"there is no folder {str(path)!r}{_near(local)}, and downloading {str(path)!r} from the hub is "
            "turned off; give the path of a local model"
        )
    raise UserError(
        f"there is no folder or file {str(path)!r}{_near(local)}; give the path of a model folder"
    )


def _open_folder(folder: Path, allow_missing_weights: bool) -> CheckpointSource:
    single = _only_gguf(folder)
    if single is not None:
        return _open_file(single)
    missing = find_missing_weights(folder) if allow_missing_weights else None
    if missing is None:
        found = SafetensorsFolder(folder)
        return _with_experts_apart(found) if quantization_method(found.config) == "mxfp4" else found
    # Imported here: it needs the blueprints, which opening what is there does not.
    from qwen_quantize.checkpoint.planned_source import PlannedSource

    return PlannedSource(folder, missing)


def quantization_method(config: Mapping[str, Any]) -> object:
    """The `quant_method` that a config.json names, whatever it is."""
    found = config.get("quantization_config")
    return found.get("quant_method") if isinstance(found, Mapping) else None


def _with_experts_apart(folder: SafetensorsFolder) -> CheckpointSource:
    # Imported here: it needs the layouts, which opening other folders does not.
    from qwen_quantize.checkpoint.mx_oss import MxOssSource

    return MxOssSource(folder)


def _only_gguf(folder: Path) -> Path | None:
    """The one GGUF of a folder without safetensors, as this program writes them; None for any other folder."""
    try:
        files = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{folder} cannot be listed: {error.strerror}") from error
    ggufs = [entry for entry in files if entry.suffix.lower() == ".gguf"]
    if len(ggufs) != 1 or any(".safetensors" in entry.name for entry in files):
        return None
    return contained_file(folder, ggufs[0].name)


def _open_file(path: Path) -> CheckpointSource:
    if path.suffix.lower() == ".gguf":
        # Imported here: most runs need no GGUF, and its package takes time to import.
        from qwen_quantize.checkpoint.gguf import GgufSource

        return GgufSource(path)
    if path.suffix == ".safetensors" or path.name.endswith(".index.json"):
        raise UserError(f"{path} is one file of a model; give the folder that holds it, {path.parent}")
    raise UserError(f"{path} is a file and not a GGUF; give a model folder, a .gguf file or a hub id")


def _near(path: Path) -> str:
    """', did you mean ...' with the entries of the parent folder whose names are close."""
    try:
        entries = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, entries, n=3, cutoff=0.5)
    if not near:
        return ""
    return " (did you mean " + ", ".join(repr(str(path.parent / name)) for name in near) + "?)"
