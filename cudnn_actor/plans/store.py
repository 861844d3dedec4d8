"""Plans on disk: a directory of files that any number of processes may share.

Nothing that goes wrong here is anybody's error: a plan that cannot be read is built again, and one that
cannot be kept is not kept. Either is one line in the log.

==========================  =======  =============================================================
log event                   level    when
==========================  =======  =============================================================
plan_store.bad_file         warning  a file is truncated, corrupted, of another key or format, not a
                                     file, not readable, or not only ours to write: path, reason
plan_store.not_kept         warning  a plan could not be written (disk full, read-only): path, reason
plan_store.unusable         warning  the directory is not only ours to write, or cannot be opened;
                                     said once until the reason changes: path, reason
==========================  =======  =============================================================

Why processes may share it without a lock: a file is written under a name of its writer's own and then
renamed onto its place, which is atomic; so whoever opens the place gets one whole file, old or new, and
keeps what it has opened though it be replaced or deleted meanwhile. Two who save one key race for a place
where either plan is right. Two who make room may both delete, and so delete too much: it is built again.

Why nothing is fsynced: after a power cut the renamed file may be short or empty. Its checksum says so, and
the plan is built again; to wait for the disk after each of hundreds of builds would cost more than that.

Why owners and modes are looked at: the device library runs what it restores as native code.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import stat
import time
from collections.abc import Iterator

from cudnn_actor.actors.logs import Log
from cudnn_actor.plans.file import BadPlanFile, PlanKey, StoredPlan, decode, encode

__all__ = ["LIMIT_BYTES", "PlanStore"]

LIMIT_BYTES = 256 << 20

_SUFFIX, _UNFINISHED = ".plan", ".unfinished"
_FORGOTTEN_S = 3600.0
"""An unfinished file this old is of a process that died over it."""
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would keep us waiting
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

log = Log("cudnn_actor")


class PlanStore:
    """Plans in a directory, least recently used first out. Any thread; every method blocks for the disk.

    Point it only at a directory that nobody but you can write: what lies there is run as native code. A
    directory or file that belongs to somebody else (root excepted), or that group or others may write, is
    ignored.

    Parameters
    ----------
    directory
        Made with mode 0700 when the first plan is saved, if it is not there. A relative one begins where
        the process is when the store is first used, and stays there.
    limit_bytes
        Bytes that the plans may take in all.
    """

    def __init__(self, directory: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._given = os.fspath(directory)
        self._limit = limit_bytes
        self._unusable = ""

    @functools.cached_property
    def directory(self) -> str:
        """The absolute path, found when it is first asked for: that may block, as all here may."""
        return os.path.abspath(self._given)

    def load(self, key: PlanKey) -> StoredPlan | None:
        """The plan of this key, or None where there is none, or none that can be trusted. Never raises."""
        with self._opened(create=False) as directory:
            if directory is not None:
                return self._load(directory, key)
        return None

    def is_empty(self) -> bool:
        """Whether no plan is kept, or none that could be used. Never raises."""
        with self._opened(create=False) as directory, contextlib.suppress(OSError):
            if directory is not None:
                with os.scandir(directory) as entries:
                    return not any(entry.name.endswith(_SUFFIX) for entry in entries)
        return True

    def save(self, key: PlanKey, plan: StoredPlan) -> None:
        """Keep a plan in the place of what is there. Never raises.

        One that is not tuned does not take the place of one that is.
        """
        with self._opened(create=True) as directory:
            if directory is None or (not plan.tuned and self._holds_tuned(directory, key)):
                return
            try:
                self._write(directory, key.file_name(), encode(key, plan))
                self._make_room(directory)
            except OSError as error:
                log.warning("plan_store.not_kept", path=self._path(key), reason=_said(error))

    def reject(self, key: PlanKey, reason: str) -> None:
        """Delete the plan of this key: the device library would not have it. Never raises."""
        log.warning("plan_store.bad_file", path=self._path(key), reason=reason)
        with self._opened(create=False) as directory:
            if directory is not None:
                _delete(directory, key.file_name())

    def _path(self, key: PlanKey) -> str:
        return os.path.join(self.directory, key.file_name())

    @contextlib.contextmanager
    def _opened(self, *, create: bool) -> Iterator[int | None]:
        """A descriptor of the directory, so that what was looked at is what is used; None if it won't do."""
        with contextlib.ExitStack() as closing:
            yield self._open(closing, create=create)

    def _open(self, closing: contextlib.ExitStack, *, create: bool) -> int | None:
        try:
            if create:
                os.makedirs(self.directory, mode=0o700, exist_ok=True)
            directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            closing.callback(os.close, directory)
            _require_ours(directory)
        except FileNotFoundError:  # nothing has been kept yet
            return None
        except OSError as error:
            self._say_unusable(_said(error))
            return None
        self._unusable = ""
        return directory

    def _say_unusable(self, reason: str) -> None:
        if reason != self._unusable:
            log.warning("plan_store.unusable", path=self.directory, reason=reason)
        self._unusable = reason

    def _load(self, directory: int, key: PlanKey) -> StoredPlan | None:
        try:
            return decode(key, self._read(directory, key.file_name()))
        except FileNotFoundError:
            return None
        except (OSError, BadPlanFile) as error:
            log.warning("plan_store.bad_file", path=self._path(key), reason=_said(error))
            return None

    def _read(self, directory: int, name: str) -> bytes:
        file = os.open(name, _READ, dir_fd=directory)
        try:
            size = _require_ours(file).st_size
            if size > self._limit:
                raise BadPlanFile(f"has {size} bytes, more than the whole store may")
            with contextlib.suppress(OSError):  # the last use, for `_make_room`; a read-only disk has none
                os.utime(file)
            with os.fdopen(file, "rb", closefd=False) as stream:
                return stream.read(size)
        finally:
            os.close(file)

    def _holds_tuned(self, directory: int, key: PlanKey) -> bool:
        try:
            return decode(key, self._read(directory, key.file_name())).tuned
        except (OSError, BadPlanFile):
            return False

    def _write(self, directory: int, name: str, content: bytes) -> None:
        if len(content) > self._limit:
            raise OSError(f"a plan of {len(content)} bytes is more than the whole store may have")
        unfinished = f"{secrets.token_hex(8)}{_UNFINISHED}"
        try:
            with os.fdopen(os.open(unfinished, _WRITE, 0o600, dir_fd=directory), "wb") as stream:
                stream.write(content)
            os.replace(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            _delete(directory, unfinished)
            raise

    def _make_room(self, directory: int) -> None:
        """Delete what was used longest ago until the rest fits the limit, and what was left unfinished."""
        kept: list[tuple[float, int, str]] = []
        with os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process makes room too
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(_SUFFIX):
                        kept.append((status.st_mtime, status.st_size, entry.name))
                    elif entry.name.endswith(_UNFINISHED) and time.time() - status.st_mtime > _FORGOTTEN_S:
                        _delete(directory, entry.name)
        excess = sum(size for _, size, _ in kept) - self._limit
        for _, size, name in sorted(kept):
            if excess <= 0:
                return
            _delete(directory, name)
            excess -= size


def _require_ours(descriptor: int) -> os.stat_result:
    """Raise `PermissionError` unless it is a file or directory that nobody else can write."""
    status = os.fstat(descriptor)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise PermissionError("is neither a file nor a directory")
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"belongs to user {status.st_uid}, whose plans would run as ours")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"may be written by others (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w it"
        )
    return status


def _delete(directory: int, name: str) -> None:
    with contextlib.suppress(OSError):  # it is gone already, or stays: then it is ignored again
        os.unlink(name, dir_fd=directory)


def _said(error: Exception) -> str:
    return str(error) or repr(error)
