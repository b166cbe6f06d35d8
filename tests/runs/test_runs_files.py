import errno
from pathlib import Path

import pytest

from flatpeak.runs.files import write_atomic


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "summary.json"
    write_atomic(path, "old and long")
    write_atomic(path, "néw")
    assert path.read_bytes() == "néw".encode()
    assert [result.name for result in tmp_path.iterdir()] == ["summary.json"]


def test_a_full_disk_leaves_the_old_content(tmp_path):
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    (tmp_path / ".tmp-summary.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [result.name for result in tmp_path.iterdir()] == ["summary.json"]


def test_where_nothing_can_be_deleted_the_error_is_that_of_writing(tmp_path, monkeypatch):
    def refuse(self, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / ".tmp-summary.json").symlink_to("/dev/full")
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "summary.json", "new")
