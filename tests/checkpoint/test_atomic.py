"""Whatever happens during a save, the old content or the new is there in full, and nothing is left lying about."""

import errno
import os
import stat
import sys

import pytest

from mesp_np.checkpoint import atomic
from mesp_np.checkpoint.atomic import new_file, new_folder
from mesp_np.errors import UserError


def save_folder(path, text):
    with new_folder(path) as fresh:
        (fresh / "a").write_text(text)
        (fresh / "b").write_text(text)


def content(path):
    return {item.name: item.read_text() for item in path.iterdir()}


def disk_full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_folder_is_replaced_and_foreign_files_stay(tmp_path):
    path = tmp_path / "deep" / "adapter"
    save_folder(path, "old")
    (path / "README.md").write_text("mine")
    save_folder(path, "new")
    assert content(path) == {"a": "new", "b": "new", "README.md": "mine"}
    assert os.listdir(path.parent) == ["adapter"]


def test_modes_follow_the_umask(tmp_path):
    previous = os.umask(0o027)
    try:
        save_folder(tmp_path / "folder", "x")
        with new_file(tmp_path / "file") as file:
            file.write(b"x")
    finally:
        os.umask(previous)
    modes = [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("folder", "folder/a", "file")]
    assert modes == [0o750, 0o640, 0o640]


def test_links_stay_links(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save_folder(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink() and content(tmp_path / "real") == {"a": "x", "b": "x"}


@pytest.mark.parametrize("interruption", [OSError(errno.EIO, "input/output error"), KeyboardInterrupt()])
def test_interrupted_block(tmp_path, interruption):
    save_folder(tmp_path / "folder", "old")
    (tmp_path / "file").write_text("old")
    for context in (new_folder(tmp_path / "folder"), new_file(tmp_path / "file")):
        with pytest.raises((UserError, KeyboardInterrupt)), context:
            raise interruption
    assert content(tmp_path / "folder") == {"a": "old", "b": "old"} and (tmp_path / "file").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_full_disk(tmp_path, monkeypatch):
    save_folder(tmp_path / "folder", "old")
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(UserError, match="folder: cannot be written .No space left"):
        save_folder(tmp_path / "folder", "new")
    with pytest.raises(UserError, match="file: cannot be written .No space left"), new_file(tmp_path / "file") as file:
        file.write(b"new")
    assert content(tmp_path / "folder") == {"a": "old", "b": "old"} and os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize("number, hint", [
    (errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"), (errno.EACCES, "ask for permission"),
    (errno.EROFS, "ask for permission"), (errno.EIO, "is unchanged; choose another place"),
    (errno.EISDIR, "is unchanged; choose another place")])
def test_the_hint_fits_the_fault(tmp_path, number, hint):
    for context in (new_file(tmp_path / "out"), new_folder(tmp_path / "out")):
        with pytest.raises(UserError) as raised, context:
            raise OSError(number, "refused")
        assert str(raised.value).startswith(f"{tmp_path}/out: cannot be written (refused); what was there is unchanged")
        assert hint in str(raised.value)


def test_the_file_at_fault_is_named_as_it_would_have_been(tmp_path):
    """Another file than the one to be written; of the folder beside, nothing is said."""
    for name, expected in (("/other/LICENSE", "(/other/LICENSE: refused)"),
                           (f"{tmp_path}/.out.new/a", f"({tmp_path}/out/a: refused)"),
                           (f"{tmp_path}/.out.new", "(refused)")):
        with pytest.raises(UserError) as raised, new_folder(tmp_path / "out"):
            raise OSError(errno.EIO, "refused", name)
        assert expected in str(raised.value)


def test_windows(tmp_path, monkeypatch):
    """Windows opens no folder, and flushes only what is open for writing."""
    plain_open, plain_sync, writable = os.open, os.fsync, set()

    def windows_open(path, flags, **inside):                     # rmtree opens folders its own way
        if os.path.isdir(path) and not inside:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        descriptor = plain_open(path, flags, **inside)
        if flags & (os.O_WRONLY | os.O_RDWR):
            writable.add(descriptor)
        return descriptor

    def windows_sync(descriptor):
        if descriptor not in writable:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        plain_sync(descriptor)

    monkeypatch.setattr(atomic, "WINDOWS", True)
    monkeypatch.setattr(os, "open", windows_open)
    monkeypatch.setattr(os, "fsync", windows_sync)
    save_folder(tmp_path / "folder", "old")
    save_folder(tmp_path / "folder", "new")
    with new_file(tmp_path / "file") as file:
        file.write(b"new")
    assert content(tmp_path / "folder") == {"a": "new", "b": "new"} and (tmp_path / "file").read_text() == "new"
    assert writable


def test_places_that_cannot_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        save_folder(tmp_path / "file", "x")
    with pytest.raises(UserError, match="cannot be written"):
        save_folder(tmp_path / "file" / "below", "x")
    with pytest.raises(UserError, match="is no ordinary file"), new_file(tmp_path):
        pass
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="current folder"):
        save_folder(".", "x")
    assert content(tmp_path) == {"file": "mine"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: is no ordinary file; name another"), new_file(tmp_path / "pipe"):
        pass
    assert (tmp_path / "pipe").is_fifo()


def killed_at(count, save):
    """Run `save` in a child that dies at its count-th operation on the file system; False when it came to the end."""
    child = os.fork()
    if not child:
        left = iter(range(count))
        watched = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir")
        sys.addaudithook(lambda event, _: event in watched and next(left, None) is None and os._exit(9))
        save()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_killed_at_every_operation(tmp_path):
    """Complete under its own name or, between the two renames, under the name beside; the next save mends all."""
    step, beside = 0, 0
    while True:
        place = tmp_path / str(step)
        path, old = place / "adapter", place / ".adapter.old"
        save_folder(path, "old")
        (path / "README.md").write_text("mine")
        if not killed_at(step, lambda path=path: save_folder(path, "new")):
            break
        beside += not path.exists()
        found = content(path if path.exists() else old)
        assert (found["a"], found["b"]) in (("old", "old"), ("new", "new"))
        save_folder(path, "next")
        assert content(path) == {"a": "next", "b": "next", "README.md": "mine"} and os.listdir(place) == ["adapter"]
        step += 1
    assert step > 10 and beside == 1
