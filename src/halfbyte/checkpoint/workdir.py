"""The hidden directory beside a target, in which the target comes into being; one run at a time holds its lock.

::

    .halfbyte-NAME/             locked (flock) while a run is at work
        manifest.json           the plan: what a run that goes on must agree with
        out/                    the target to be; shards get their names here when they are complete and synced
                                those of several checkpoints in one target are named FOLDER/SHARD
        kept/SHARD.json         what later steps need of a finished shard; on disk before the shard has its name
        SHARD-XXXXXXXX.tmp      a shard under way; the name is new in each run, so that no stray process finds it
        old/                    a target that is being replaced
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfbyte.errors import TargetError

_LONGEST = 200
_MANIFEST = "manifest.json"


class WorkDirectory:
    """The working directory of a target. ``enter`` locks it; ``leave`` removes it, whatever has happened."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.absolute().parent / f".halfbyte-{_short(target.name)}"
        self.out, self._old = self.path / "out", self.path / "old"
        self._token, self._fd = secrets.token_hex(4), -1

    def enter(self, plan: Mapping[str, Any], force: bool, resume: bool) -> None:
        """Lock the directory and make it ready: empty, or with what a killed run of the same plan has finished.

        Args:
            plan: as JSON; {} if the run cannot be resumed.
            force: start over where a killed run has left something.
            resume: go on with it; before ``force``.

        Raises:
            TargetError: another run holds the lock, something is left and neither is asked for, or its plan differs.
        """
        try:
            self._lock()
            self._restore()
            left = self._left()
            check_target(self.target, force)
            if left and resume:
                self._compare(left, plan)
            elif left and not force:
                raise TargetError(
                    "a run that was killed has left unfinished work",
                    file=str(self.path),
                    hint="pass --resume to go on with it, or --force to start over",
                )
        except BaseException:
            self._release()
            raise
        try:
            self._clear(keep=bool(left) and resume)
            for folder in (self.out, self.path / "kept"):
                folder.mkdir(exist_ok=True)
            if plan and not (left and resume):
                self._write_manifest(plan)
        except OSError as error:
            self.leave()
            raise TargetError("cannot write the target", file=str(self.target), got=error.strerror) from None
        except BaseException:
            self.leave()
            raise

    def tidy(self) -> None:
        """Remove what is left of a run that nobody can go on with: it was killed before it began, or at its end."""
        if self.path.is_dir():
            with contextlib.suppress(TargetError):
                self._lock()
                self._restore()
                if self._left():
                    self._release()
                else:
                    self.leave()

    def leave(self) -> None:
        """Remove the directory and let go of its lock; a target that was set aside goes back."""
        if self._fd >= 0:
            self._restore()
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1

    def commit(self) -> None:
        """Let ``out`` take the place of the target; one that exists is kept until that is done."""
        try:
            if self.target.exists():
                self._old.mkdir()
                self.target.rename(self._old / self.target.name)
            self.out.rename(self.target)
        except BaseException:
            self._restore()
            raise
        sync(self.target.absolute().parent)

    def temporary(self, name: str) -> Path:
        """Where a shard is written."""
        return self.path / f"{_flat(name)}-{self._token}.tmp"

    def kept_file(self, name: str) -> Path:
        """Where what is kept of a shard lies."""
        return self.path / "kept" / f"{_flat(name)}.json"

    def kept(self, name: str) -> Any:
        """What was kept of a shard that is finished; None if it is not."""
        return _json_of(self.kept_file(name)) if (self.out / name).is_file() else None

    def _lock(self) -> None:
        while self._fd < 0:
            try:
                with contextlib.suppress(FileExistsError):
                    self.path.mkdir()
                fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                if self.path.parent.is_dir():
                    continue  # another run has just removed it
                raise
            except OSError as error:
                raise TargetError(
                    "cannot write into the directory", file=str(self.path.parent), got=error.strerror
                ) from None
            except BaseException:  # interrupted before the lock is there; only an empty one can be ours
                with contextlib.suppress(OSError):
                    self.path.rmdir()
                raise
            self._fd = self._locked(fd)

    def _locked(self, fd: int) -> int:
        """``fd`` if it holds the lock of the directory that has the name now, else -1."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                return fd
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(fd)
            raise TargetError(
                "another run is writing this target", file=str(self.target), hint="let it end, or choose another name"
            ) from None
        except OSError as error:
            os.close(fd)
            hint = "choose a target on a file system with locks"
            raise TargetError("cannot lock the directory", file=str(self.path), got=error.strerror, hint=hint) from None
        os.close(fd)
        return -1

    def _release(self) -> None:
        """Let go of the lock and leave what a killed run has left; an empty directory goes."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            os.close(self._fd)
            self._fd = -1

    def _restore(self) -> None:
        """Put back a target that was moved away and whose successor has not come."""
        aside = self._old / self.target.name
        if aside.exists() and not os.path.lexists(self.target):
            aside.rename(self.target)

    def _left(self) -> Mapping[str, Any]:
        """The plan of a killed run; {} if nothing is left that one could go on with."""
        found = _json_of(self.path / _MANIFEST)
        return found if isinstance(found, dict) and self.out.is_dir() else {}

    def _compare(self, left: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(plan))
        if left == now:
            return
        key, before, after = _difference(left, now)
        raise TargetError(
            f"the unfinished work is of another plan: {key} differs",
            file=str(self.path),
            got=after,
            expected=before,
            hint="resume with the command and source it was begun with, or pass --force without --resume to start over",
        )

    def _clear(self, keep: bool) -> None:
        """Remove what is not finished, or with ``keep=False`` everything."""
        for path in self.path.iterdir():
            if path.name == _MANIFEST and keep:
                continue
            if path.name == "kept" and keep:
                continue
            if path.name == "out" and keep:
                finished = {file.name.removesuffix(".json") for file in (self.path / "kept").glob("*.json")}
                _remove_others(path, "", finished)
                continue
            _remove(path)

    def _write_manifest(self, plan: Mapping[str, Any]) -> None:
        temporary = self.path / f"{_MANIFEST}.tmp"
        with open(temporary, "w", encoding="utf-8") as handle:
            json.dump(plan, handle)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.rename(self.path / _MANIFEST)
        sync(self.path)


def check_target(target: Path, force: bool, source: Path | None = None) -> None:
    """Refuse a target that cannot or may not be written, or that holds ``source``.

    Raises:
        TargetError: with what to do.
    """
    parent = target.absolute().parent
    if not target.name:
        raise TargetError("not a name for a directory", file=str(target))
    if not parent.is_dir():
        raise TargetError(
            "the directory to write into does not exist", file=str(parent), hint=f"run: mkdir -p {parent}"
        )
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise TargetError("the target exists and is not a directory", file=str(target), hint="choose another name")
    if source is not None and target.resolve() in (source.resolve(), *source.resolve().parents):
        raise TargetError("the target is or holds the source", file=str(target), hint="choose another name")
    if force and _is_something_else(target):
        raise TargetError(
            "the target is not a checkpoint, and --force replaces nothing else",
            file=str(target),
            hint="choose another name",
        )
    if not force and any(target.iterdir()):
        raise TargetError(
            "the target exists", file=str(target), hint="choose another name, or pass --force to replace it"
        )


def _is_something_else(folder: Path) -> bool:
    """Whether a directory is a repository, or holds directories and no weights: not what anybody means to replace."""
    weights = any(folder.glob("*.safetensors")) or any(folder.glob("rank-*-of-*/*.safetensors"))
    return (folder / ".git").exists() or (not weights and any(path.is_dir() for path in folder.iterdir()))


def sync(path: Path) -> None:
    """Wait until a file or the entries of a directory are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _short(name: str) -> str:
    """A name that leaves room for what is put around it, the same for the same name."""
    data = os.fsencode(name)
    if len(data) <= _LONGEST:
        return name
    return f"{os.fsdecode(data[:100])}-{hashlib.sha256(data).hexdigest()[:16]}"


def _flat(name: str) -> str:
    """The name of a shard, which may be in a folder, as that of a file."""
    return name.replace("/", "!")


def _remove_others(folder: Path, above: str, finished: set[str]) -> None:
    """Remove what is not among the finished shards, whose flat names are given."""
    for path in folder.iterdir():
        name = above + path.name
        if path.is_dir() and any(shard.startswith(f"{name}!") for shard in finished):
            _remove_others(path, f"{name}!", finished)
        elif name not in finished:
            _remove(path)


def _json_of(file: Path) -> Any:
    """What a JSON file holds; None where it is missing or broken."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _difference(a: Any, b: Any, key: str = "") -> tuple[str, Any, Any]:
    """The first place in which two JSON values differ: (key, value there, value here), in few words."""
    if isinstance(a, dict) and isinstance(b, dict):
        name = next(k for k in {**a, **b} if a.get(k) != b.get(k))
        return _difference(a.get(name), b.get(name), f"{key} {name}".strip())
    if isinstance(a, list) and isinstance(b, list) and len(a) + len(b) > 8:
        a, b = f"{len(a)} entries", f"{len(b)} entries"
    return key, a, b


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
