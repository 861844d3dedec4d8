"""Temporary folders of one process. The next process removes folders that killed processes have left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from cudnn_actor.actors import forks

__all__ = ["OwnFolder"]

_LOCK = "in-use"
"""The file in each folder on which its process holds a lock, which ends with it, however that ends."""
_WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
"""The errors of `flock` on a file system that has no such locks: Lustre has them only if it is mounted so."""


class OwnFolder:
    """A new temporary folder, which only this user can read.

    The constructor also removes this user's folders for the same purpose whose processes have ended without
    removing them. It blocks for the file system, and raises `OSError`.

    A folder on a file system without locks is not removed by others, and removes none.

    Parameters
    ----------
    purpose
        A word for the folder's name.
    """

    def __init__(self, purpose: str) -> None:
        self._prefix = f"cudnn-actor-{purpose}-"
        self._remove_left()
        lock: int | None = None
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=self._prefix))
            try:
                lock = _take_lock(self.path)
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:
                    shutil.rmtree(self.path, ignore_errors=True)
                    raise
                (self.path / _LOCK).unlink()  # else a process that can lock it may take the folder for left
                break
            if lock is not None:
                break
            # Another process has found it between the two lines above, takes it for one that was left, and
            # removes it.
        self._lock = lock
        self._unlock = forks.finalize(self, _close, lock)  # of one that is lost, which the next one removes
        forks.watch(self)

    def remove(self) -> None:
        """Remove the folder with everything in it. Blocks for the file system. Idempotent."""
        if self._unlock.alive:
            _remove(self.path)
            self._unlock()  # last: until then, nobody else removes it

    def forget_parent(self) -> None:
        """Leave the folder to the parent. Called in a forked child."""
        if self._unlock.detach() is not None:
            _close(self._lock)

    def _remove_left(self) -> None:
        for path in Path(tempfile.gettempdir()).glob(f"{self._prefix}*"):
            with contextlib.suppress(OSError):  # its process, or another one that looks, has removed it
                found = path.lstat()
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and (path / _LOCK).exists():
                    lock = _take_lock(path)
                    if lock is not None:
                        _remove(path)
                        os.close(lock)


def _close(lock: int | None) -> None:
    """Close the descriptor of a lock, if there is one."""
    if lock is not None:
        os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder whose lock this process holds. If some of it stays, the next process finds it.

    The file with the lock goes last: other processes remove only a folder that has one. Another process may
    still make a file meanwhile, such as the socket of a pool's member. Then the file is made again, and
    nobody has locked it.
    """
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != _LOCK:
                with contextlib.suppress(OSError):  # whoever made it may remove it at the same time
                    os.unlink(entry.path)
        if os.listdir(folder) in ([], [_LOCK]):
            (folder / _LOCK).unlink(missing_ok=True)
            try:
                folder.rmdir()
            except OSError:
                (folder / _LOCK).touch(0o600)


def _take_lock(folder: Path) -> int | None:
    """A descriptor of a folder's lock, which this process holds now; None if another process holds it, or
    has removed the folder.

    Raises `OSError`, also on a file system without locks.
    """
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = os.stat(folder / _LOCK, follow_symlinks=False)
        if (there.st_dev, there.st_ino) == (os.fstat(lock).st_dev, os.fstat(lock).st_ino):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None
