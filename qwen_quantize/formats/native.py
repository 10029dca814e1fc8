"""Compiles a C file of the package on first use and loads it through ctypes; None where that cannot be done.

The shared object lies in a private folder of the user's cache, named by the SHA-256 of everything it depends
on: the source, the compiler's version, the flags and the CPU's features (it is built for this very CPU). It
is written under a temporary name and renamed, so that processes that start together do no harm. Callers have
a torch twin that gives the same bits; `QWEN_QUANTIZE_NATIVE=0` makes them use it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

COMPILE_SECONDS = 120
FLAGS = (
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",  # fused multiply-add would make sums differ from machine to machine
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
)


def native_enabled() -> bool:
    """Whether the environment allows native kernels: `QWEN_QUANTIZE_NATIVE` is not 0."""
    return os.environ.get("QWEN_QUANTIZE_NATIVE", "1") != "0"


def load_native(source_path: Path, *, libraries: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The C file at `source_path`, compiled (once for each user and machine) and loaded.

    `libraries` are linker flags such as "-lm". The file must not include files of its own, or a change in
    them goes unnoticed. None when native code is switched off or there is no C compiler; a compiler that
    fails is a RuntimeWarning with its first error line, and None. Setting argtypes is the caller's part.
    """
    if not native_enabled():
        return None
    return _load(_resolved(source_path), libraries)


def native_status(source_path: Path, *, libraries: tuple[str, ...] = ()) -> str:
    """In one phrase, whether the kernels of `source_path` are native, and if not, why."""
    if not native_enabled():
        return "off (QWEN_QUANTIZE_NATIVE=0)"
    if _compiler() is None:
        return "off (no C compiler: install cc, gcc or clang)"
    loaded = _load(_resolved(source_path), libraries)
    return "off (the C compiler failed)" if loaded is None else "native"


@functools.cache
def _resolved(path: Path) -> Path:
    return path.resolve()  # some kernels run for less time than this takes


@functools.cache
def _load(source_path: Path, libraries: tuple[str, ...]) -> ctypes.CDLL | None:
    compiler = _compiler()
    if compiler is None:
        return None
    source, features = source_path.read_bytes(), _cpu_features()
    # Compilers prefer half-width vectors on AVX-512 machines, for the sake of old ones that slowed down.
    flags = (*FLAGS, "-mprefer-vector-width=512") if b"avx512f" in features else FLAGS
    key = hashlib.sha256()
    for part in (
        source,
        _version(compiler).encode(),
        " ".join((*FLAGS, *libraries)).encode(),
        _cpu_features(),
    ):
        key.update(len(part).to_bytes(8, "little") + part)
    name = f"{source_path.stem}-{key.hexdigest()}.so"
    folder = _cache_folder()
    library = folder / name
    try:
        if not (library.is_file() and _is_private(library)):
            _compile([compiler, *flags], source_path, libraries, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        first_line = next((line for line in reason.splitlines() if "error" in line), reason.strip())
        warnings.warn(
            f"{source_path.name}: no native kernels, the slower torch path is used ({first_line})",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def _compile(command: list[str], source: Path, libraries: tuple[str, ...], library: Path) -> None:
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=library.parent)  # mode 0600
    os.close(handle)
    try:
        whole = [*command, "-o", temporary, str(source), *libraries]
        subprocess.run(whole, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        Path(temporary).chmod(0o700)
        Path(temporary).replace(library)
    finally:
        Path(temporary).unlink(missing_ok=True)


@functools.cache
def _compiler() -> str | None:
    """$CC if it is a single command that exists, else cc, gcc or clang."""
    candidates = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def _version(compiler: str) -> str:
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=COMPILE_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{compiler}\n{done.stdout}"


def _cpu_features() -> bytes:
    """What `-march=native` depends on: a home folder may be shared by machines with different CPUs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    kinds = ("flags", "Features", "model name", "CPU part")
    wanted = sorted({line for line in lines if line.startswith(kinds)})
    return "\n".join([platform.machine(), platform.processor(), *wanted]).encode()


@functools.cache
def _cache_folder() -> Path:
    """The user's private cache folder; a fresh temporary one where that cannot be made or is not private."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
        folder = root / "qwen_quantize" / "native"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_private(folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        pass
    return Path(tempfile.mkdtemp(prefix="qwen_quantize-"))


def _is_private(path: Path) -> bool:
    """Whether only this user can have written `path`: loading another's library runs another's code."""
    info = path.lstat()
    return info.st_uid == os.getuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
