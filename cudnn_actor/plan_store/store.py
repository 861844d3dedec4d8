"""Plans on disk: a directory of files that any number of processes may share.

Failures here raise no error: a plan that cannot be read is built again, and one that cannot be written is not
stored. Each failure is one line in the log.

==========================  =======  =============================================================
log event                   level    when
==========================  =======  =============================================================
plan_store.bad_file         warning  a file is truncated, corrupted, of another key or format, not a
                                     file, not readable, or writable by others: path, reason
plan_store.not_kept         warning  a plan could not be written (disk full, read-only): path, reason
plan_store.unusable         warning  the directory is writable by others, or cannot be opened;
                                     logged again only when the reason changes: path, reason
==========================  =======  =============================================================

Why processes may share a directory without a lock: a file is written under a unique name and then renamed to
its final name, which is atomic. So a process that opens the final name gets one complete file, old or new,
and can read it even if it is replaced or deleted meanwhile. If two processes save one key, the last rename
wins, and either plan is right. If two processes make room, both may delete files, and so delete too many:
those plans are built again.

Why nothing is fsynced: after a power cut the renamed file may be short or empty. Its checksum shows that, and
the plan is built again. Waiting for the disk after each of hundreds of builds would cost more than that.

Why owners and modes are checked: the device library runs what it restores as native code.
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
from cudnn_actor.plan_store.plan_file import BadPlanFile, PlanKey, StoredPlan, decode, encode

__all__ = ["LIMIT_BYTES", "PlanStore"]

LIMIT_BYTES = 256 << 20

_SUFFIX, _UNFINISHED = ".plan", ".unfinished"
_FORGOTTEN_S = 3600.0
"""An unfinished file of this age (seconds) was left by a process that died while writing it."""
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # so that opening a pipe does not block
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

log = Log("cudnn_actor")


class PlanStore:
    """Plans in a directory; the least recently used is deleted first. Any thread; all methods block for the
    disk.

    Choose a directory that only you can write to: its files are run as native code. A directory or file is
    ignored if it belongs to another user (except root), or if its group or others may write it.

    Parameters
    ----------
    directory
        Created with mode 0700 when the first plan is saved, if it does not exist. A relative path is resolved
        once, against the current directory at the store's first use.
    limit_bytes
        The most bytes that all plans together may take.
    """

    def __init__(self, directory: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._given = os.fspath(directory)
        self._limit = limit_bytes
        self._unusable = ""

    @functools.cached_property
    def directory(self) -> str:
        """The absolute path, resolved at the first use. May block, like every method here."""
        return os.path.abspath(self._given)

    def load(self, key: PlanKey) -> StoredPlan | None:
        """The plan of this key; None if there is none that can be trusted. Never raises."""
        with self._directory(create=False) as directory:
            if directory is not None:
                return self._load(directory, key)
        return None

    def is_empty(self) -> bool:
        """Whether the store has no plan, or cannot be used. Never raises."""
        with self._directory(create=False) as directory, contextlib.suppress(OSError):
            if directory is not None:
                with os.scandir(directory) as entries:
                    return not any(entry.name.endswith(_SUFFIX) for entry in entries)
        return True

    def save(self, key: PlanKey, plan: StoredPlan) -> None:
        """Store a plan, replacing an earlier one of its key unless that has a higher rank. Never raises."""
        with self._directory(create=True) as directory:
            if directory is None or plan.rank < self._rank(directory, key):
                return
            try:
                self._write(directory, key.file_name(), encode(key, plan))
                self._make_room(directory)
            except OSError as error:
                log.warning("plan_store.not_kept", path=self._path(key), reason=_text_of(error))

    def reject(self, key: PlanKey, reason: str) -> None:
        """Delete the plan of this key, because the device library refused it. Never raises."""
        log.warning("plan_store.bad_file", path=self._path(key), reason=reason)
        with self._directory(create=False) as directory:
            if directory is not None:
                _delete(directory, key.file_name())

    def _path(self, key: PlanKey) -> str:
        return os.path.join(self.directory, key.file_name())

    @contextlib.contextmanager
    def _directory(self, *, create: bool) -> Iterator[int | None]:
        """A descriptor of the directory; None if it is unusable.

        A path could name another directory later; the descriptor is still of the directory checked here.
        """
        with contextlib.ExitStack() as closing:
            yield self._open(closing, create=create)

    def _open(self, closing: contextlib.ExitStack, *, create: bool) -> int | None:
        try:
            if create:
                os.makedirs(self.directory, mode=0o700, exist_ok=True)
            directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            closing.callback(os.close, directory)
            _require_ours(directory)
        except FileNotFoundError:  # nothing has been stored yet
            return None
        except OSError as error:
            self._log_unusable(_text_of(error))
            return None
        self._unusable = ""
        return directory

    def _log_unusable(self, reason: str) -> None:
        if reason != self._unusable:
            log.warning("plan_store.unusable", path=self.directory, reason=reason)
        self._unusable = reason

    def _load(self, directory: int, key: PlanKey) -> StoredPlan | None:
        try:
            return decode(key, self._read(directory, key.file_name()))
        except FileNotFoundError:
            return None
        except (OSError, BadPlanFile) as error:
            log.warning("plan_store.bad_file", path=self._path(key), reason=_text_of(error))
            return None

    def _read(self, directory: int, name: str) -> bytes:
        file = os.open(name, _READ, dir_fd=directory)
        try:
            size = _require_ours(file).st_size
            if size > self._limit:
                raise BadPlanFile(f"has {size} bytes, more than the whole store's limit of {self._limit}")
            # records the last use, for `_make_room`; fails on a read-only disk
            with contextlib.suppress(OSError):
                os.utime(file)
            with os.fdopen(file, "rb", closefd=False) as stream:
                return stream.read(size)
        finally:
            os.close(file)

    def _rank(self, directory: int, key: PlanKey) -> int:
        """The rank of the plan that is stored; 0 without one."""
        try:
            return decode(key, self._read(directory, key.file_name())).rank
        except (OSError, BadPlanFile):
            return 0

    def _write(self, directory: int, name: str, content: bytes) -> None:
        if len(content) > self._limit:
            raise OSError(f"the plan has {len(content)} bytes, more than the store's limit of {self._limit}")
        unfinished = f"{secrets.token_hex(8)}{_UNFINISHED}"
        try:
            with os.fdopen(os.open(unfinished, _WRITE, 0o600, dir_fd=directory), "wb") as stream:
                stream.write(content)
            os.replace(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            _delete(directory, unfinished)
            raise

    def _make_room(self, directory: int) -> None:
        """Delete the least recently used plans until the rest fits the limit, and old unfinished files."""
        kept: list[tuple[float, int, str]] = []
        with os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process has deleted it
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
    """Raise `PermissionError` unless this is a file or directory that no other user can write to."""
    status = os.fstat(descriptor)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise PermissionError("is neither a file nor a directory")
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"belongs to user {status.st_uid}, whose code would run as this user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"may be written by others (mode {stat.S_IMODE(status.st_mode):04o}); run chmod go-w on it"
        )
    return status


def _delete(directory: int, name: str) -> None:
    with contextlib.suppress(OSError):  # it is gone already, or it stays, and `load` ignores it again
        os.unlink(name, dir_fd=directory)


def _text_of(error: Exception) -> str:
    return str(error) or repr(error)
