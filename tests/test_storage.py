"""Work directories: files are replaced atomically, folders are moved aside, and one process uses them at a time."""

import pytest

from jaxalign.errors import UserError
from jaxalign.storage import LocalStorage, read_json, write_json


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "run")


def test_written_files_are_read_back_and_listed(storage):
    storage.write("b/c.bin", b"\x00\xff")
    write_json(storage, "a.json", {"x": [1, None, "é"]})
    assert storage.read("b/c.bin") == b"\x00\xff" and read_json(storage, "a.json") == {"x": [1, None, "é"]}
    assert storage.list() == ["a.json", "b/c.bin"] and storage.list("b") == ["c.bin"] and storage.size("b/c.bin") == 2


def test_missing_files_read_as_none_and_missing_folders_list_as_empty(storage):
    assert storage.read("a") is None and read_json(storage, "a") is None and storage.list("a") == []
    storage.write("a", b"")
    assert storage.read("a/b") is None and storage.read("a") == b"" and storage.list("a") == []
    assert storage.size("a") == storage.size("b") == 0
    storage.remove("nothing")


def test_a_failed_write_leaves_the_old_content(storage, monkeypatch):
    storage.write("a", b"old")

    def crash(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError):
        storage.write("a", b"new")
    assert storage.read("a") == b"old"


def test_folders_are_moved_aside_under_the_next_free_number(storage):
    for content in (b"1", b"2"):
        storage.write("sft/x", content)
        storage.move_aside("sft")
    assert storage.read("sft.old-1/x") == b"1" and storage.read("sft.old-2/x") == b"2" and storage.list("sft") == []


def test_a_folder_is_removed_with_its_content(storage):
    storage.write("sft/x/y", b"")
    storage.remove("sft")
    assert not storage.path("sft").exists()


def test_a_number_that_json_cannot_represent_is_refused(storage):
    with pytest.raises(ValueError):
        write_json(storage, "a", float("nan"))


def test_a_locked_directory_is_refused(storage):
    with storage.lock(), pytest.raises(UserError, match="in use by process"), LocalStorage(storage.folder).lock():
        pass
    with storage.lock():
        pass


def test_the_lock_removes_the_temporary_files_of_killed_processes(tmp_path):
    left = [tmp_path / ".summary.json.123.tmp", tmp_path / "sft" / ".rows-00000.jsonl.77.tmp"]
    kept = [tmp_path / ".mine.tmp", tmp_path / "sft" / "notes.1.tmp"]
    (tmp_path / "sft").mkdir()
    for path in (*left, *kept):
        path.write_text("x")
    with LocalStorage(tmp_path).lock():
        assert [path.exists() for path in (*left, *kept)] == [False, False, True, True]
