"""`--from`: a quantized folder in another layout."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.cli.check import check_written
from qwen_quantize.cli.console import Speaker, canonical_json
from qwen_quantize.cli.quantize import check_output
from qwen_quantize.cli.session import REPORT_NAME, peak_memory_bytes, use_threads
from qwen_quantize.errors import UserError
from qwen_quantize.pipeline.conversion import Conversion, plan_conversion
from qwen_quantize.pipeline.conversion_run import conversion_manifest, convert
from qwen_quantize.pipeline.manifest import MANIFEST_NAME
from qwen_quantize.pipeline.recipe import Output
from qwen_quantize.report.numbers import human_bytes
from qwen_quantize.report.page import render_page


@dataclass(frozen=True, slots=True)
class ConvertRequest:
    """source: a quantized folder or GGUF. scheme: to what linears without an exact form are quantized again.

    device: the chip whose tiles are written, for the layout that has some.
    """

    source: str
    layout: str | None
    requantize: bool
    scheme: str | None
    device: str | None = None


def run_convert(
    request: ConvertRequest,
    output_path: Path | None,
    *,
    resume: bool,
    overwrite: bool,
    threads: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    use_threads(threads)
    begin = time.perf_counter()
    speaker = Speaker(as_json, quiet)
    if request.layout is None:
        raise UserError("--from converts to another layout: name it with --layout")
    if output_path is None:
        raise UserError("--from writes a new folder: name it with --output-path")
    if request.scheme is not None and not request.requantize:
        raise UserError("--scheme says nothing beside --from unless --requantize is given")
    check_output(output_path, [request.source])
    source = open_source(request.source)
    conversion = plan_conversion(
        source,
        request.layout,
        requantize=request.requantize,
        scheme=request.scheme,
        chip=None if request.device is None else load_profile(request.device),
    )
    notes = conversion_notes(conversion)
    for note in notes:
        speaker.say(f"note: {note}")
    asked = {key: value for key, value in asdict(request).items() if key != "source"}
    with speaker.progress("convert") as progress:
        converted = convert(conversion, source, Output(output_path, resume, overwrite), asked, progress)
    if converted.input_scales_changed:
        notes.append(
            f"the weights are exact, but the inputs of {len(converted.input_scales_changed)} linears get scales of "
            f"another format: layout {request.layout} has no word for the source's"
        )
        speaker.say(f"note: {notes[-1]}")
    try:
        manifest = conversion_manifest(conversion, converted, source, asked)
        manifest["check"] = check_written(converted.folder.staging, speaker)
        converted.folder.add_file(MANIFEST_NAME, canonical_json(manifest))
        converted.folder.add_file(REPORT_NAME, render_page(manifest).encode())
        converted.folder.finish()
    except BaseException:
        converted.folder.close()
        raise
    record = manifest["conversion"]
    speaker.say(
        f"{record['linears']} linears from {manifest['converted_from']['layout']} to {request.layout}, "
        f"{record['linears'] - record['requantized']} of them bit by bit as they were; "
        f"{human_bytes(manifest['output_bytes'])} in {output_path}"
    )
    speaker.result(
        {
            "layout": request.layout,
            "converted_from": manifest["converted_from"],
            "exact": record["exact"],
            "linears": record["linears"],
            "requantized": record["requantized"],
            "largest_relative_squared_error": record["largest_relative_squared_error"],
            "check": manifest["check"],
            "notes": notes,
            "output_path": str(output_path),
            "output_bytes": manifest["output_bytes"],
            "seconds": time.perf_counter() - begin,
            "peak_memory_bytes": peak_memory_bytes(),
        }
    )


def conversion_notes(conversion: Conversion) -> list[str]:
    """What a user should know of a conversion before it runs."""
    notes = []
    if conversion.casts_dropped:
        notes.append(
            f"the inputs of {len(conversion.casts_dropped)} linears were cast and stay in 16 bits now: layout "
            f"{conversion.layout.name} has weights alone"
        )
    if conversion.scales_dropped:
        notes.append(
            f"{len(conversion.scales_dropped)} tensors with scales of the key-value cache are left out, the first is "
            f"{conversion.scales_dropped[0]!r}: engines of layout {conversion.layout.name} do not look for them"
        )
    if conversion.requantized:
        notes.append(
            f"{len(conversion.requantized)} of {len(conversion.schemes)} linears have no exact form in layout "
            f"{conversion.layout.name} and are quantized again; the manifest states what each loses"
        )
    return notes
