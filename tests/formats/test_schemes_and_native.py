"""The table of schemes, and the loader of native code where it must refuse or fall back."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from qwen_quantize.formats import native
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.formats.tables import E4M3FN, E8M0


def test_named_schemes() -> None:
    assert list(SCHEMES) == [
        "ue8m0",
        "mxfp8",
        "mxfp6",
        "mxfp4",
        "nvfp4",
        "fp8",
        "w8a8",
        "w4a16",
        "w8a16",
        "w4a8",
        "hif8",
    ]
    ue8m0 = SCHEMES["ue8m0"]
    assert (ue8m0.weight.format, ue8m0.weight.scale_format) == (E4M3FN, E8M0)
    assert ue8m0.weight.granularity == Granularity.block(128, 128)
    assert ue8m0.weight.scale_rule is ScaleRule.SEARCH
    assert ue8m0.activation is not None
    assert ue8m0.activation.granularity == Granularity.group(128)
    assert ue8m0.activation.scale_rule is ScaleRule.RCEIL
    for name, scheme in SCHEMES.items():
        assert scheme.name == name
        assert "\n" not in scheme.description
        assert scheme.dynamic == (scheme.activation is not None)
        for spec in (scheme.weight, scheme.activation):
            assert spec is None or (spec.scale_rule is not None) == (spec.scale_format is E8M0)


def test_with_block() -> None:
    smaller = SCHEMES["ue8m0"].with_block(64, 32)
    assert smaller.weight.granularity == Granularity.block(64, 32)
    assert smaller.activation is not None
    assert smaller.activation.granularity == Granularity.group(32)
    assert smaller.name == "ue8m0"
    assert SCHEMES["w4a8"].with_block(1, 64).weight.granularity == Granularity.group(64)
    assert SCHEMES["w4a8"].with_block(1, 64).activation == SCHEMES["w4a8"].activation
    with pytest.raises(ValueError, match="no block size"):
        SCHEMES["fp8"].with_block(128, 128)


@pytest.fixture
def fresh_loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A loader that remembers nothing and caches under tmp_path."""
    cached = (native._load, native._cache_folder, native._compiler)
    for function in cached:
        function.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    yield tmp_path
    for function in cached:
        function.cache_clear()


def test_compiles_once_into_a_private_folder(fresh_loader: Path) -> None:
    source = fresh_loader / "answer.c"
    source.write_text("int answer(void) { return 42; }\n")
    library = native.load_native(source)
    assert library is not None
    assert library.answer() == 42
    folder = fresh_loader / "cache" / "qwen_quantize" / "native"
    built = list(folder.iterdir())
    assert [path.suffix for path in built] == [".so"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not built[0].stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    assert native.native_status(source) == "native"
    before = built[0].stat().st_mtime_ns
    native._load.cache_clear()
    assert native.load_native(source) is not None
    assert built[0].stat().st_mtime_ns == before, "the second start takes the built library"
    source.write_text("int answer(void) { return 43; }\n")
    native._load.cache_clear()
    changed = native.load_native(source)
    assert changed is not None
    assert changed.answer() == 43


def test_a_folder_others_can_write_is_not_used(fresh_loader: Path) -> None:
    folder = fresh_loader / "cache" / "qwen_quantize" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    source = fresh_loader / "answer.c"
    source.write_text("int answer(void) { return 42; }\n")
    assert native.load_native(source) is not None
    assert not list(folder.iterdir())


def test_broken_source_warns_and_gives_none(fresh_loader: Path) -> None:
    source = fresh_loader / "broken.c"
    source.write_text("int answer(void) { return }\n")
    with pytest.warns(RuntimeWarning, match=r"broken\.c: no native kernels.*error"):
        assert native.load_native(source) is None
    assert native.native_status(source) == "off (the C compiler failed)"


def test_no_compiler_and_switched_off(fresh_loader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fresh_loader / "answer.c"
    source.write_text("int answer(void) { return 42; }\n")
    monkeypatch.setenv("PATH", str(fresh_loader))
    assert native.load_native(source) is None
    assert "install cc" in native.native_status(source)
    monkeypatch.setenv("QWEN_QUANTIZE_NATIVE", "0")
    assert native.load_native(source) is None
    assert native.native_status(source) == "off (QWEN_QUANTIZE_NATIVE=0)"
