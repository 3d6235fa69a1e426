"""Writing that never leaves half a result: write beside, flush to the disk, rename.

A rename is one step for the file system.  A reader finds the old content or the new, and
so does the next run when this one is killed or the disk is full.  What is mapped stays
readable while its file is replaced: the old bytes live as long as the mapping.

The names beside are fixed, `.NAME.new` and `.NAME.old`, so that what a killed run left
is cleared away by the next one.  Files get the usual mode (the umask's), and a symbolic
link keeps pointing at what it names.
"""

import errno
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

from mesp_np.errors import UserError

WINDOWS = os.name == "nt"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def new_file(path):
    """A binary file to write, which takes the place of `path` when the block ends well.

    Raises UserError when the system refuses; `path` is then as it was.
    """
    path = Path(os.path.realpath(path))
    fresh = path.with_name(f".{path.name}.new")
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is no ordinary file", "name another")
    with reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(fresh, "wb") as file:
                yield file
            _flush(fresh)
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        _flush(path.parent)


@contextmanager
def new_folder(path):
    """An empty folder to fill with files, which takes the place of `path` when the block ends well.

    Files of the old folder that the new one lacks are carried over.  Replacing takes two
    renames; a run killed in the instant between them leaves the old folder as `.NAME.old`,
    and the next save starts by putting it back.

    Raises UserError when the system refuses; `path` is then as it was.
    """
    path = Path(os.path.realpath(path))
    fresh, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    _refuse_place(path)
    with reported(path):
        _settle(path, old)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        try:
            yield fresh
            for file in fresh.iterdir():
                _flush(file)
            if path.exists():
                path.rename(old)
            fresh.rename(path)
        except UserError as error:                     # of a file inside: say where it would have been
            raise UserError(str(error).replace(fresh.name, path.name)) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            _settle(path, old)
        _flush(path.parent)


def _refuse_place(path):
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file", "name a folder")
    if path == Path.cwd():
        raise UserError(f"{path}: is the current folder, which cannot be replaced", "name a folder inside it")


def _settle(path, old):
    """End a replacement, perhaps one that was cut short: put the old folder back, or carry over what is only there."""
    if not old.exists():
        return
    if not path.exists():
        old.rename(path)
        return
    for item in old.iterdir():
        if not (path / item.name).exists():
            item.rename(path / item.name)
    shutil.rmtree(old)


def _flush(path):
    """Wait until a file, or the names in a folder, are on the disk.

    Windows flushes only what is open for writing, and no folders.
    """
    folder = path.is_dir()
    if folder and WINDOWS:
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reported(path, left="what was there is unchanged"):
    """Turn the system's refusal to write into a UserError that names `path`, and the file at fault if it is another.

    left  what can be said of `path` then
    """
    try:
        yield
    except OSError as error:
        fault = str(error.filename or path).replace(f".{path.name}.new", path.name)
        reason = error.strerror or str(error)
        reason = reason if fault == str(path) else f"{fault}: {reason}"
        raise UserError(f"{path}: cannot be written ({reason})", f"{left}; {_remedy(error.errno)}") from error


def _remedy(number):
    """What to try after an error with this errno."""
    if number in FULL:
        return "free some space or choose another place"
    return "ask for permission, or choose another place" if number in FORBIDDEN else "choose another place"
