"""Statistics of a model's inputs as files: made once from text, read for any chip and method, and merged.

A folder holds `statistics.json` and for each half of a layer and each routed expert one safetensors file. Of each
stream S in it: `S.tokens` I64 [1], `S.weight_total` F64 [1], `S.amax` F32 [K], `S.total`, `S.squares` and `S.cross`
F64 [K], `S.histogram` I64 [256, 8], `S.ranges` I64 [r], `S.moments` F64, the rows of each range's upper triangle
one after another, and n sampled tokens, `S.sample_keys` I64 [n], ascending, `S.sample_inputs` F32 [n, K] and
`S.sample_weight` F32 [n]. The meaning of each is that of `InputStatistics`, gathered without any chip's cast. An
expert's file may also hold the stream `anyone`: what its second input would see of an average token.

Every file is read as a hostile one: names, shapes and values are checked before anything is computed from them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from qwen_quantize.calibrators.observers import InputStatistics, TokenSample, merge_statistics
from qwen_quantize.calibrators.output_gain import SAMPLE_TOKENS
from qwen_quantize.checkpoint.disk import disk_errors, replacing
from qwen_quantize.checkpoint.json_file import parse_object
from qwen_quantize.checkpoint.local_files import contained_file
from qwen_quantize.checkpoint.safetensors_header import SafetensorsHeader, read_header
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.tensor_info import DTYPES
from qwen_quantize.errors import UserError

FORMAT = 1
MANIFEST = "statistics.json"
ANYONE = "anyone"

_MOST_BYTES = 256 << 20  # of the manifest: some hundred bytes for each expert of the largest models
_AGAIN = "collect the statistics again"
_STRIP = 256  # rows that are mirrored together
_FIELDS = {
    "tokens": "I64", "weight_total": "F64", "amax": "F32", "total": "F64", "squares": "F64", "histogram": "I64",
    "cross": "F64", "ranges": "I64", "moments": "F64",
    "sample_keys": "I64", "sample_inputs": "F32", "sample_weight": "F32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """The statistics of one stream, gathered without a cast, and the keys of its sample: [n] int64, ascending.

    The sample holds the tokens with the smallest keys of all that were seen. A key says where in the text a token
    stands, so the sample does not depend on how the text was divided.
    """

    statistics: InputStatistics
    keys: Tensor


@dataclass(frozen=True, slots=True)
class Data:
    """One text that was run through the model, as `CalibrationTokens` describes it."""

    dataset: str
    sha256: str
    windows: int
    length: int
    tokens: int
    seed: int
    note: str


@dataclass(frozen=True, slots=True)
class Unit:
    """The file of half a layer or of one routed expert. streams: tokens that each has seen."""

    file: str
    sha256: str
    nbytes: int
    streams: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StatisticsManifest:
    """What `statistics.json` holds. layers: of each one `tokens` and, where it has routed experts, `experts`."""

    version: str
    path: str
    fingerprint: str
    architecture: str
    tokenizer: str
    data: tuple[Data, ...]
    layers: tuple[Mapping[str, Any], ...]
    units: Mapping[str, Unit]

    def record(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "tool": {"name": "qwen_quantize", "version": self.version},
            "model": {
                "path": self.path,
                "fingerprint": self.fingerprint,
                "architecture": self.architecture,
            },
            "tokenizer_sha256": self.tokenizer,
            "data": [asdict(one) for one in self.data],
            "layers": [dict(one) for one in self.layers],
            "units": {
                name: {"file": u.file, "sha256": u.sha256, "nbytes": u.nbytes, "streams": dict(u.streams)}
                for name, u in self.units.items()
            },
        }


def tokenizer_sha256(source: CheckpointSource) -> str:
    """SHA-256 over the model's tokenizer files, by name."""
    digest = hashlib.sha256()
    for name, content in sorted(source.side_files().items()):
        if name.startswith(("LICENSE", "NOTICE", "generation_config")) or "processor_config" in name:
            continue
        data = content if isinstance(content, bytes) else Path(content).read_bytes()
        for part in (name.encode(), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def unit_file(unit: str) -> str:
    return f"{unit}.safetensors"


def write_unit(folder: Path, unit: str, streams: Mapping[str, StreamStatistics]) -> Unit:
    """Write a unit's file, whole and durable; ResumableError when the disk fails."""
    tensors: dict[str, Tensor] = {}
    for name, stream in streams.items():
        tensors |= {f"{name}.{field}": tensor for field, tensor in _packed(stream).items()}
    content = save(tensors)
    path = folder / unit_file(unit)
    with disk_errors(path, len(content)), replacing(path) as file:
        file.write(content)
    counts = {name: stream.statistics.tokens for name, stream in streams.items()}
    return Unit(path.name, hashlib.sha256(content).hexdigest(), len(content), counts)


def _packed(stream: StreamStatistics) -> dict[str, Tensor]:
    seen = stream.statistics
    assert seen.sample is not None
    ranges = [moment.shape[0] for moment in seen.second_moments]
    moments = torch.empty(sum(size * (size + 1) // 2 for size in ranges), dtype=torch.float64)
    begin = 0
    for moment in seen.second_moments:
        for row in range(moment.shape[0]):
            moments[begin : begin + moment.shape[0] - row] = moment[row, row:]
            begin += moment.shape[0] - row
    return {
        "tokens": torch.tensor([seen.tokens]),
        "weight_total": torch.tensor([seen.weight_total], dtype=torch.float64),
        "amax": seen.amax.contiguous(),
        "total": seen.total.contiguous(),
        "squares": seen.squares.contiguous(),
        "cross": seen.cross.contiguous(),
        "histogram": seen.histogram.contiguous(),
        "ranges": torch.tensor(ranges),
        "moments": moments,
        "sample_keys": stream.keys.contiguous(),
        "sample_inputs": seen.sample.inputs.contiguous(),
        "sample_weight": seen.sample.weight.contiguous(),
    }


@dataclass(frozen=True, slots=True)
class StatisticsFolder:
    """A folder whose manifest is read. sha256: of the manifest, which holds that of every file."""

    path: Path
    manifest: StatisticsManifest
    sha256: str

    @property
    def nbytes(self) -> int:
        return sum(unit.nbytes for unit in self.manifest.units.values())

    def require_model(self, source: CheckpointSource) -> None:
        """UserError for statistics of another model, or of the same with another tokenizer."""
        if self.manifest.fingerprint != source.fingerprint():
            raise UserError(
                f"{self.path} holds the statistics of another model, {self.manifest.path}; give the one that they "
                "were collected from, with the same --rotate, or collect new ones with --collect"
            )
        if self.manifest.tokenizer != tokenizer_sha256(source):
            raise UserError(
                f"{self.path}: the statistics were collected with another tokenizer than that of {source.path}; "
                f"{_AGAIN}"
            )

    def read(
        self, unit: str, features: Mapping[str, int] | None = None, *, moments: bool = True
    ) -> dict[str, StreamStatistics]:
        """The streams of a unit; UserError for whatever is wrong. features: of each stream that must be there.

        moments: second moments too, which are most of the bytes; else there are none.
        """
        entry = self.manifest.units.get(unit)
        if entry is None:
            raise UserError(f"{self.path / MANIFEST} knows nothing of {unit}; {_AGAIN}")
        header = read_header(contained_file(self.path, entry.file))
        names = dict.fromkeys(name.rpartition(".")[0] for name in header.tensors)
        found = {name: _read_stream(header, name, moments) for name in names}
        if {name: one.statistics.tokens for name, one in found.items()} != dict(entry.streams):
            raise UserError(f"{header.file} holds other streams than {MANIFEST} says; {_AGAIN}")
        for name, size in (features or {}).items():
            if name not in found or found[name].statistics.amax.shape[0] != size:
                raise UserError(f"{header.file} has no stream {name!r} of {size} features; {_AGAIN}")
        return found

    def verify(self) -> None:
        """UserError naming the first file that is not the one that was written."""
        for unit in self.manifest.units.values():
            with contained_file(self.path, unit.file).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != unit.sha256:
                raise UserError(f"{self.path / unit.file} was changed since it was written; {_AGAIN}")


def read_statistics(path: Path | str) -> StatisticsFolder:
    """Open a folder of statistics; UserError for whatever is no such folder."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{path} is no folder of statistics; make one with --collect")
    file = contained_file(folder, MANIFEST)
    try:
        with file.open("rb") as stream:
            data = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    if len(data) > _MOST_BYTES:
        raise UserError(f"{file} is larger than {_MOST_BYTES} bytes, which no such file needs; {_AGAIN}")
    record = parse_object(data, str(file))
    if record.get("format") != FORMAT:
        raise UserError(
            f"{file} has the format {record.get('format')!r:.40}, this program reads {FORMAT}; {_AGAIN}"
        )
    return StatisticsFolder(folder, _Checked(file).manifest(record), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True)
class _Checked:
    """Reads fields of a manifest that nobody vouches for."""

    file: Path

    def _of(self, record: Any, key: str, kind: type) -> Any:
        value: Any = record.get(key) if isinstance(record, dict) else None
        negative = isinstance(value, int) and (isinstance(value, bool) or value < 0)
        if not isinstance(value, kind) or (kind is int and negative):
            raise UserError(f"{self.file}: {key!r} is {value!r:.40}, which cannot be; {_AGAIN}")
        return value

    def manifest(self, record: dict[str, Any]) -> StatisticsManifest:
        model, tool = self._of(record, "model", dict), self._of(record, "tool", dict)
        units = self._of(record, "units", dict)
        return StatisticsManifest(
            version=self._of(tool, "version", str),
            path=self._of(model, "path", str),
            fingerprint=self._of(model, "fingerprint", str),
            architecture=self._of(model, "architecture", str),
            tokenizer=self._of(record, "tokenizer_sha256", str),
            data=tuple(self._data(one) for one in self._of(record, "data", list)),
            layers=tuple(self._layer(one) for one in self._of(record, "layers", list)),
            units={name: self._unit(one) for name, one in units.items()},
        )

    def _data(self, one: Any) -> Data:
        texts = {key: self._of(one, key, str) for key in ("dataset", "sha256", "note")}
        return Data(
            **texts, **{key: self._of(one, key, int) for key in ("windows", "length", "tokens", "seed")}
        )

    def _layer(self, one: Any) -> dict[str, Any]:
        layer = {"layer": self._of(one, "layer", int), "tokens": self._of(one, "tokens", int)}
        experts = [self._of({"experts": count}, "experts", int) for count in self._of(one, "experts", list)]
        return {**layer, "experts": experts}

    def _unit(self, one: Any) -> Unit:
        streams = self._of(one, "streams", dict)
        counts = {name: self._of(streams, name, int) for name in streams}
        return Unit(
            self._of(one, "file", str), self._of(one, "sha256", str), self._of(one, "nbytes", int), counts
        )


def _read_stream(header: SafetensorsHeader, name: str, with_moments: bool) -> StreamStatistics:
    def refuse(field: str, what: str) -> UserError:
        return UserError(f"{header.file}: {name}.{field} {what}; {_AGAIN}")

    found: dict[str, Tensor] = {}
    for field, dtype in _FIELDS.items():
        stored = header.tensors.get(f"{name}.{field}")
        if stored is None or stored.info.dtype != dtype:
            raise refuse(field, f"is missing, or not {dtype}")
        if field != "moments" or with_moments:
            found[field] = _read_tensor(header, f"{name}.{field}")
    features, sampled = found["amax"].numel(), found["sample_keys"].numel()
    ranges = found["ranges"].tolist() if found["ranges"].dim() == 1 else []
    if not ranges or min(ranges) < 1 or sum(ranges) != features:
        raise refuse("ranges", f"do not make {features} features")
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": (1,), "weight_total": (1,), "amax": (features,), "total": (features,), "squares": (features,),
        "cross": (features,),
        "histogram": (256, 8), "ranges": (len(ranges),), "moments": (sum(k * (k + 1) // 2 for k in ranges),),
        "sample_keys": (sampled,), "sample_inputs": (sampled, features), "sample_weight": (sampled,),
    }  # fmt: skip
    for field, shape in shapes.items():
        stored_shape = header.tensors[f"{name}.{field}"].info.shape
        if tuple(stored_shape) != shape:
            raise refuse(field, f"has the shape {list(stored_shape)} and not {list(shape)}")
        if field not in found:
            continue
        tensor = found[field]
        if tensor.is_floating_point() and not math.isfinite(float(tensor.sum())):
            raise refuse(field, "holds a number that is not finite")
        if field not in ("total", "moments", "sample_inputs") and tensor.numel() and float(tensor.min()) < 0:
            raise refuse(field, "holds a negative number")
    moments = _unpacked(found["moments"], ranges) if with_moments else ()
    if any(float(moment.diagonal().min()) < 0 for moment in moments):
        raise refuse("moments", "hold a negative square")
    return StreamStatistics(
        InputStatistics(
            tokens=int(found["tokens"]),
            amax=found["amax"],
            total=found["total"],
            squares=found["squares"],
            histogram=found["histogram"],
            second_moments=moments,
            cross=found["cross"],
            weight_total=float(found["weight_total"]),
            sample=TokenSample(found["sample_inputs"], found["sample_weight"]),
        ),
        found["sample_keys"],
    )


def _read_tensor(header: SafetensorsHeader, name: str) -> Tensor:
    stored = header.tensors[name]
    dtype = DTYPES[stored.info.dtype].torch
    assert dtype is not None
    tensor = torch.empty(stored.info.shape, dtype=dtype)
    view = tensor.reshape(-1).view(torch.uint8).numpy().data
    try:
        with header.file.open("rb", buffering=0) as file:
            file.seek(stored.begin)
            done = 0
            while done < len(view):
                got = file.readinto(view[done:])
                if not got:
                    raise UserError(f"{header.file} became shorter while it was read; {_AGAIN}")
                done += got
    except OSError as error:
        raise UserError(f"{header.file} cannot be read: {error.strerror}") from error
    return tensor


def _unpacked(packed: Tensor, ranges: list[int]) -> tuple[Tensor, ...]:
    moments, begin = [], 0
    for size in ranges:
        moment = torch.empty(size, size, dtype=torch.float64)
        for row in range(size):
            moment[row, row:] = packed[begin : begin + size - row]
            begin += size - row
        for first in range(0, size, _STRIP):
            last = first + _STRIP
            corner = moment[first:last, first:last].triu()
            moment[first:last, first:last] = corner + corner.triu(1).T
            moment[last:, first:last] = moment[first:last, last:].T
        moments.append(moment)
    return tuple(moments)


def merge_streams(a: StreamStatistics, b: StreamStatistics) -> StreamStatistics:
    """The statistics of both texts together: integers, amax and sampled tokens exactly, sums in float64.

    UserError where the second moments were gathered over different ranges of features.
    """
    if [m.shape for m in a.statistics.second_moments] != [m.shape for m in b.statistics.second_moments]:
        raise UserError(
            "the second moments were gathered over different ranges of features, so they cannot be merged; collect "
            "both with the same --max-memory"
        )
    merged = merge_statistics(a.statistics, b.statistics)
    assert merged.sample is not None
    keys = torch.cat([a.keys, b.keys])
    order = keys.argsort(stable=True)[:SAMPLE_TOKENS]
    sample = TokenSample(merged.sample.inputs[order], merged.sample.weight[order])
    return StreamStatistics(replace(merged, sample=sample), keys[order])
