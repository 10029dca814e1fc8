"""The hidden sibling folder in which an output grows, owned by one run at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from qwen_quantize.checkpoint.disk import sync_folder
from qwen_quantize.errors import UserError

# One of these says that a folder is a model folder, which --overwrite may remove.
_MODEL_FILES = ("config.json", "qwen_quantize.json", "model.safetensors", "model.safetensors.index.json")


class StagingFolder:
    """`.<name>.partial` beside the target, locked; becomes the target by a rename.

    The lock is a file beside the folder, because the folder itself is renamed and removed. marks: names of which a
    folder must hold one for `overwrite` to remove it; what: such a folder, in words.
    """

    def __init__(
        self,
        target: Path,
        *,
        resume: bool,
        overwrite: bool,
        marks: Sequence[str] = _MODEL_FILES,
        what: str = "model folder",
    ) -> None:
        # A link as target is followed: renaming over it would replace the link.
        self.target = Path(os.path.realpath(target))
        self._marks, self._what = marks, what
        if self.target.name == "":
            raise UserError(f"{target} cannot be an output folder; give another --output-path")
        self.path = self.target.with_name(f".{self.target.name}.partial")
        self._replaced = self.target.with_name(f".{self.target.name}.replaced")
        self._lock_path = self.target.with_name(f".{self.target.name}.lock")
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.target.parent} cannot be created: {error.strerror}") from error
        self._lock: int | None = self._acquire()
        try:
            self._recover()
            self._check_target(overwrite)
            self.resumed = self._prepare(resume, overwrite)
        except OSError as error:
            self.release()
            raise UserError(f"{self.path} cannot be prepared: {error.strerror or error}") from error
        except BaseException:
            self.release()
            raise

    def _acquire(self) -> int:
        while True:
            try:
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            except OSError as error:
                raise UserError(f"{self._lock_path} cannot be created: {error.strerror}") from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise UserError(
                        f"another run is writing {self.target}; wait for it or give another --output-path"
                    ) from error
                raise UserError(
                    f"{self._lock_path} cannot be locked: {error.strerror}; give an --output-path on another "
                    "file system"
                ) from error
            # Its owner may have removed the file between our open and our lock: then the lock means nothing.
            try:
                if os.path.samestat(os.fstat(lock), self._lock_path.stat()):
                    return lock
            except FileNotFoundError:
                pass
            os.close(lock)

    def _recover(self) -> None:
        """Finish or undo a replacement that a killed run left half done."""
        if not self._replaced.exists():
            return
        if self.target.exists():
            shutil.rmtree(self._replaced)
        else:
            self._replaced.rename(self.target)

    def _check_target(self, overwrite: bool) -> None:
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise UserError(f"{self.target} is a file; give a folder as --output-path")
        if not any(self.target.iterdir()):
            return
        if not overwrite:
            raise UserError(
                f"{self.target} exists and is not empty; give --overwrite or another --output-path"
            )
        if not any((self.target / name).exists() for name in self._marks):
            raise UserError(
                f"{self.target} is not empty and no {self._what}, so --overwrite does not remove it; give "
                "another --output-path"
            )

    def _prepare(self, resume: bool, overwrite: bool) -> bool:
        """Create the folder or take the old one over; True when there was one to resume."""
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise UserError(f"{self.path} is in the way and was not made by this program; remove it")
        if self.path.exists():
            if resume:
                return True
            if not overwrite:
                raise UserError(
                    f"an interrupted run left {self.path}; go on with --resume, or start again with "
                    "--overwrite"
                )
            shutil.rmtree(self.path)
        self.path.mkdir()
        sync_folder(self.path.parent)  # what is synced inside is worth nothing while its folder is not
        return False

    def publish(self) -> None:
        """Put the folder in the target's place; the target is complete or absent at every moment."""
        if self.target.exists() and any(self.target.iterdir()):
            self.target.rename(self._replaced)
        self.path.rename(self.target)
        sync_folder(self.target.parent)
        if self._replaced.exists():
            shutil.rmtree(self._replaced)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def release(self) -> None:
        """Give up the lock and remove its file; may be called again."""
        if self._lock is not None:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None
