"""`qwen_quantize init-ci`: pipeline files that check a model's chip every night. Does not import torch."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from qwen_quantize.cli.guard import guard
from qwen_quantize.cli.options import Json
from qwen_quantize.errors import UserError

_MODEL = "models/out"
_DEVICE = "npu:0"
# The device string under which torch knows the chips of a family.
_DEVICES = {
    "ascend": "npu:0",
    "cambricon": "mlu:0",
    "moorethreads": "musa:0",
    "enflame": "gcu:0",
    "nvidia": "cuda:0",
    "amd": "cuda:0",
    "hygon": "cuda:0",
    "iluvatar": "cuda:0",
    "metax": "cuda:0",
    "kunpeng": "cpu",
    "phytium": "cpu",
    "cpu": "cpu",
}
_CODES = "Exit code 1: the gate says no, and regress.xml why. Exit code 2: bad input."
_PLACEHOLDER = re.compile(r"^([ ]*)@([A-Z]+)@$", re.MULTILINE)


def _yaml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _groovy(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _unit(text: str) -> str:
    """Inside the double quotes of an Environment= line, where % begins a specifier."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


@dataclass(frozen=True, slots=True)
class Target:
    """What is written: files by the ending of their names, the first of which is `output` itself."""

    templates: Mapping[str, str]
    output: str
    quoted: Callable[[str], str]
    comment: str = "#"
    has_model: bool = True


TARGETS = {
    "github": Target({"": "github.yml"}, ".github/workflows/arithmetic.yml", _yaml),
    "gitlab": Target({"": "gitlab.yml"}, ".gitlab-ci.yml", _yaml),
    "jenkins": Target({"": "jenkins.groovy"}, "Jenkinsfile", _groovy, comment="//"),
    "systemd": Target(
        {".service": "systemd.service", ".timer": "systemd.timer", ".sh": "check.sh"},
        "qwen-quantize.service",
        _unit,
    ),
    "container": Target({"": "Containerfile"}, "Containerfile", str, has_model=False),
}


def init_ci_command(
    target: Annotated[str, typer.Argument(help="github, gitlab, jenkins, systemd or container.")],
    model: Annotated[
        str | None, typer.Option("--model", help=f"Output folder as the runner sees it (default: {_MODEL}).")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="What `probe --on` asks there (default: by the model's chip)."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="File to write (default: where the service looks).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write a pipeline that probes, compares, evaluates, gates and, on demand, quantizes again."""
    with guard(as_json):
        from qwen_quantize.cli.console import Speaker

        if target not in TARGETS:
            raise UserError(f"{target!r} is none of {', '.join(TARGETS)}")
        kind = TARGETS[target]
        if not kind.has_model and (model is not None or device is not None):
            raise UserError(f"--model and --device say nothing beside {target}; leave them out")
        where = output or Path(kind.output)
        if target == "systemd" and not re.fullmatch(r"[\w-]+\.service", where.name):
            raise UserError(
                f"--output {where}: a unit is named by letters, digits, - and _, and ends in .service"
            )
        model = model or _MODEL
        device = device or device_of(model)
        for flag, text in (("--model", model), ("--device", device)):
            if not text.isprintable() or not text.strip():
                raise UserError(f"{flag} {text!r} cannot stand in a pipeline; name one line of plain text")
        written = pipeline_files(target, model, device, where)
        _write(written, force, make_parents=output is None)
        speaker = Speaker(as_json, quiet=False)
        for path in written:
            speaker.say(f"wrote {path}")
        if kind.has_model:
            speaker.say(f"it checks {model} on {device}; what else to adjust stands in its first lines")
        names = [str(path) for path in written]
        said = {"model": model, "device": device} if kind.has_model else {"model": None, "device": None}
        speaker.result({"target": target, "files": names, **said})


def pipeline_files(target: str, model: str, device: str, where: Path) -> dict[Path, str]:
    """Path -> content of everything that `target` consists of."""
    kind = TARGETS[target]
    values: dict[str, Any] = {
        "MODEL": kind.quoted(model),
        "DEVICE": kind.quoted(device),
        "FOLDER": _unit(str(where.resolve().parent)),
        "NAME": where.stem,
        "PATH": _unit(f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"),
    }
    found = {}
    for ending, name in kind.templates.items():
        template = _template(name)
        path = where if not ending else where.with_suffix(ending)
        found[path] = _filled(template, values, kind.comment)
    return found


def device_of(model: str) -> str:
    """What the model's chip is called by torch, where its manifest can be read here; else a common one.

    UserError for a chip of a family that no torch device is known of.
    """
    from qwen_quantize.checkpoint.json_file import RECORD_BYTES, read_object
    from qwen_quantize.chip_profiles.loader import chip_names

    manifest = Path(model) / "qwen_quantize.json"
    if not manifest.is_file():
        return _DEVICE
    chip = read_object(manifest, RECORD_BYTES).get("chip")
    name = chip.get("name") if isinstance(chip, dict) else None
    family = next((it.family for it in chip_names() if it.name == name), None)
    if family not in _DEVICES:
        raise UserError(
            f"no torch device is known for the chip {name!r:.40} of {model}; name it with --device"
        )
    return _DEVICES[family]


def _template(name: str) -> str:
    return files("qwen_quantize.cli").joinpath("templates", name).read_text(encoding="utf-8")


def _filled(template: str, values: Mapping[str, str], comment: str) -> str:
    """Blocks first: a placeholder that is alone on its line stands for several, each as far to the right."""

    def block(found: re.Match[str]) -> str:
        indent, name = found.groups()
        if name == "NOTES":
            notes = [line for line in _template("variables.txt").splitlines() if _named(line) in template]
            lines = [f"{comment} {line}" for line in [*notes, _CODES]]
        elif name == "ARTIFACTS":
            lines = ["fingerprint.json", "eval.json", "compare.html", "report.html", "regress.xml"]
        else:
            lines = _template(f"{name.lower()}.sh").splitlines()
        return "\n".join(indent + line for line in lines)

    text = _PLACEHOLDER.sub(block, template)
    return re.sub(
        r"@(" + "|".join(values) + r")@", lambda found: values[found[1]], text
    )  # in one pass: a value that looks like a placeholder stays as it is


def _named(line: str) -> str:
    return line.partition(":")[0]


def _write(contents: Mapping[Path, str], force: bool, make_parents: bool) -> None:
    """All or none: everything is checked before the first file is written."""
    for path in contents:
        if path.is_dir():
            raise UserError(f"{path} is a folder; name a file with --output")
        if path.exists() and not force:
            raise UserError(
                f"{path} is there already; name another with --output, or replace it with --force"
            )
        if not make_parents and not path.parent.is_dir():
            raise UserError(f"--output {path}: there is no folder {path.parent}; make it first")
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
