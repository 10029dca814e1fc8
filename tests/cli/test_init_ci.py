"""The pipelines of `qwen_quantize init-ci`: what is written, and that it does what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from qwen_quantize.cli.init_ci import TARGETS, device_of, pipeline_files
from qwen_quantize.cli.main import app
from qwen_quantize.errors import UserError

Run = Callable[..., Result]
ROOT = Path(__file__).resolve().parent.parent.parent
ARTIFACTS = ["fingerprint.json", "eval.json", "compare.html", "report.html", "regress.xml"]
ODD = 'a b/"it\'s" 100% $HOME \\n @DEVICE@ #x: {{y}} 模型'


def text_of(target: str, model: str = "models/out", device: str = "npu:0") -> str:
    return next(iter(pipeline_files(target, model, device, Path("x.service")).values()))


def jobs(target: str, model: str = "models/out", device: str = "npu:0") -> dict[str, list[str]]:
    """Job -> the lines that it gives to a shell, those that install the program apart."""
    text = text_of(target, model, device)
    if target == "github":
        found = yaml.safe_load(text)["jobs"]
        return {
            name: next(step["run"] for step in job["steps"] if step.get("name") == name).splitlines()
            for name, job in found.items()
        }
    if target == "gitlab":
        found = yaml.safe_load(text)
        return {
            name: [line for part in found[name]["script"] for line in part.splitlines() if line != "set -e"]
            for name in ("check", "recalibrate")
        }
    stages = re.findall(r"stage\('(\w+)'\).*?sh '''\n(.*?)\n\s*'''", text, re.DOTALL)
    return {
        name: [
            line.strip() for line in block.splitlines() if not line.strip().startswith(("set -e", "PATH="))
        ]
        for name, block in stages
        if name != "install"
    }


def test_the_services_run_the_same_commands() -> None:
    github = jobs("github")
    assert set(github) == {"check", "recalibrate"}
    assert jobs("gitlab") == github
    assert jobs("jenkins") == github
    script = pipeline_files("systemd", "m", "cpu", Path("x.service"))[Path("x.sh")]
    assert script.splitlines() == github["check"]


@pytest.mark.parametrize("target", ["github", "gitlab", "jenkins"])
def test_every_command_has_its_variables_and_the_shell_takes_it(target: str) -> None:
    text = text_of(target)
    for lines in jobs(target).values():
        script = "\n".join(lines)
        subprocess.run(["sh", "-n"], input=script, text=True, check=True)
        for name in set(re.findall(r"\$\{?([A-Z]+)", script)):
            assert re.search(rf"^\s*{name}: |name: '{name}'", text, re.MULTILINE), name
            assert re.search(rf"^(?:#|//) {name}: ", text, re.MULTILINE), f"{name} is not explained"
    assert not re.search(r"@[A-Z]+@", text)


def test_artifacts_are_kept_whatever_the_gate_says() -> None:
    github = yaml.safe_load(text_of("github"))
    for job in github["jobs"].values():
        kept = job["steps"][-1]
        assert kept["if"] == "always()"
        assert kept["with"]["path"].split() == ARTIFACTS
    gitlab = yaml.safe_load(text_of("gitlab"))
    kept = gitlab[".arithmetic"]["artifacts"]
    assert (kept["when"], kept["paths"], kept["reports"]) == ("always", ARTIFACTS, {"junit": "regress.xml"})
    assert gitlab["recalibrate"]["when"] == "manual"
    assert ",".join(ARTIFACTS) in text_of("jenkins")
    assert github[True]["schedule"]  # `on` is a truth value to YAML 1.1


def test_odd_names_arrive_as_they_are() -> None:
    for target in ("github", "gitlab"):
        found = yaml.safe_load(text_of(target, ODD, "cpu"))
        assert (found.get("env") or found["variables"])["MODEL"] == ODD
    (groovy,) = re.findall(r"'MODEL', defaultValue: '((?:[^'\\]|\\.)*)'\)", text_of("jenkins", ODD, "cpu"))
    assert re.sub(r"\\(.)", r"\1", groovy) == ODD
    (unit,) = re.findall(r'^Environment="MODEL=(.*)"$', text_of("systemd", ODD, "cpu"), re.MULTILINE)
    assert re.sub(r"\\(.)", r"\1", unit).replace("%%", "%") == ODD


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path, run: Run) -> None:
    assert run("init-ci", "systemd", "--output", tmp_path / "nightly.service").exit_code == 0
    files = [tmp_path / f"nightly.{ending}" for ending in ("service", "timer")]
    done = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "nightly" not in done.stderr


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_nothing_is_replaced_unasked(
    target: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = run("init-ci", target, "--json")
    assert first.exit_code == 0
    files = [Path(name) for name in json.loads(first.stdout)["files"]]
    assert files[0] == Path(TARGETS[target].output)
    written = [file.read_bytes() for file in files]
    files[-1].write_text("mine")
    assert run("init-ci", target).exit_code == 2
    assert files[-1].read_text() == "mine"
    assert run("init-ci", target, "--force").exit_code == 0
    assert [file.read_bytes() for file in files] == written


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["buildbot"], "is none of github"),
        (["github", "--output", "none/x.yml"], "there is no folder"),
        (["github", "--output", "."], "is a folder"),
        (["github", "--model", "a\nb"], "--model"),
        (["github", "--device", " "], "--device"),
        (["container", "--model", "m"], "say nothing beside container"),
        (["systemd", "--output", "x.txt"], "ends in .service"),
        (["systemd", "--output", "a b.service"], "is named by letters"),
    ],
)
def test_bad_requests(
    arguments: list[str], complaint: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("init-ci", *arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_device_follows_the_models_chip(tmp_path: Path) -> None:
    assert device_of(str(tmp_path)) == "npu:0"
    manifest = tmp_path / "qwen_quantize.json"
    manifest.write_text('{"chip": {"name": "cambricon-mlu590"}}')
    assert device_of(str(tmp_path)) == "mlu:0"
    for chip in ('{"name": "example"}', "7", '{"name": ["x"]}'):
        manifest.write_text(f'{{"chip": {chip}}}')
        with pytest.raises(UserError, match="--device"):
            device_of(str(tmp_path))


@pytest.mark.parametrize(
    ("target", "name"),
    [("github", "github-actions.yml"), ("gitlab", "gitlab-ci.yml"), ("jenkins", "Jenkinsfile")],
)
def test_the_examples_in_the_documents_are_these(target: str, name: str) -> None:
    path = ROOT / "docs" / "ci" / name
    assert path.read_text(encoding="utf-8") == text_of(target), (
        f"run `qwen_quantize init-ci {target} --output docs/ci/{name} --force`"
    )


def check(folder: Path, job: str, **environment: str) -> int:
    """Run one job of the written GitHub pipeline as its runner does; its exit code."""
    pipeline = yaml.safe_load((folder / "pipeline.yml").read_text())
    script = next(step["run"] for step in pipeline["jobs"][job]["steps"] if step.get("name") == job)
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            **pipeline["env"],
            **environment,
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode


def failures(folder: Path) -> list[str]:
    """The checks that failed in the JUnit report."""
    cases = ElementTree.parse(folder / "regress.xml").iter("testcase")
    return [case.get("name", "") for case in cases if case.find("failure") is not None]


@pytest.mark.slow
def test_green_before_red_after_green_after_recalibration(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "qwen_quantize"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m qwen_quantize "$@"\n')
    program.chmod(0o755)
    made = ["--device", "example@1.2", "--output-path", str(tmp_path / "model"), "--validation-tokens", "512"]
    for arguments in (
        made,
        ["init-ci", "github", "--model", "model", "--device", "emulated:example@1.2",
         "--output", str(tmp_path / "pipeline.yml")],
    ):  # fmt: skip
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    few = {"TOKENS": "1024"}
    assert check(tmp_path, "check", **few) == 0
    assert failures(tmp_path) == []
    assert all((tmp_path / name).stat().st_size for name in ARTIFACTS)
    assert json.loads((tmp_path / "eval.json").read_text())["tokens"] > 500

    upgraded = {**few, "DEVICE": "emulated:example@1.3"}
    for name in ARTIFACTS:
        (tmp_path / name).unlink()
    assert check(tmp_path, "check", **upgraded) == 1
    assert failures(tmp_path)
    assert all((tmp_path / name).stat().st_size for name in ARTIFACTS)

    assert check(tmp_path, "recalibrate", **upgraded) == 0
    assert failures(tmp_path) == []
    assert check(tmp_path, "check", **upgraded, MODEL="model.new") == 0
    assert failures(tmp_path) == []
