"""Checksums of folders, recorded and verified by several processes."""

import errno
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from nanotrain_jax.checkpoint import checksums


@pytest.fixture
def folder(tmp_path):
    for name, size in {"5/a": 1000, "5/d/b": 700, "5/d/c": 650, "arrays/5/x": 300, "5/empty": 0}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(i * 7 % 251 for i in range(size)))
    return tmp_path


PARTS = ("5", "arrays/5")


def record(folder, count):
    for i in range(count):
        assert not checksums.recorded(folder / "sums")
        checksums.record(folder, PARTS, folder / "sums", i, count)
    assert checksums.recorded(folder / "sums")


def damage(folder, count):
    return [checksums.damage(folder, folder / "sums", i, count) for i in range(count)]


@pytest.mark.parametrize("made_by", [1, 3, 7])
@pytest.mark.parametrize("read_by", [1, 2, 7])
def test_several_processes_together_check_every_file(folder, made_by, read_by):
    record(folder, made_by)
    assert not any(damage(folder, read_by))
    for name in "5/a", "5/d/b", "5/d/c", "arrays/5/x":
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(bytes([good[0] ^ 64]) + good[1:])
        assert [text for text in damage(folder, read_by) if text] == [f"{name} is damaged"]
        (folder / name).write_bytes(good[:-1])
        assert [text for text in damage(folder, read_by) if text] == [f"{name} is damaged"]
        (folder / name).write_bytes(good)


def test_missing_files_are_reported(folder):
    record(folder, 2)
    shutil.rmtree(folder / "arrays")
    (text,) = filter(None, damage(folder, 2))
    assert text == f"{folder}/arrays/5/x cannot be read (No such file or directory)"
    (folder / "sums" / "files.json").unlink()
    assert damage(folder, 2) == [f"{folder}/sums/files.json cannot be read (No such file or directory)"] * 2


def test_errors_of_a_network_or_of_this_process_are_not_damage(folder, monkeypatch):
    record(folder, 1)
    for number in errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.EMFILE:
        monkeypatch.setattr(checksums, "sums", mock.Mock(side_effect=OSError(number, "no", "file")))
        with pytest.raises(OSError, match="no"):
            damage(folder, 1)
    monkeypatch.setattr(checksums, "sums", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error", "5/a")))
    assert damage(folder, 1) == ["5/a cannot be read (Input/output error)"]


def test_a_flipped_bit_in_the_checksums_is_detected(folder):
    record(folder, 1)
    for file in (folder / "sums").iterdir():
        good = file.read_bytes()
        for bit in range(8 * len(good)):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            file.write_bytes(bad)
            assert any(damage(folder, 1)), bytes(bad)
        file.write_bytes(good)


def flips(path):
    """Write a file with each of its bits flipped, one after another; in the end as it was."""
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        yield bad
    path.write_bytes(good)


@pytest.mark.parametrize("count", [1, 2])
def test_a_flipped_bit_of_a_sealed_folder_is_refused_by_one_of_its_processes(tmp_path, count):
    for name in "a", "sub/b":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"0123")
    checksums.check(tmp_path)  # of a folder without checksums nothing is known
    checksums.seal(tmp_path)
    for name in "a", "sub/b", checksums.OF_FOLDER:
        for bad in flips(tmp_path / name):
            with pytest.raises(ValueError, match=checksums.OF_FOLDER) as error:
                for index in range(count):
                    checksums.check(tmp_path, index, count)
            assert "\n" not in str(error.value), bad
        checksums.check(tmp_path)
    (tmp_path / checksums.OF_FOLDER).write_text('{"../outside": [1, 1]}')
    with pytest.raises(ValueError, match=r"has no file \.\./outside"):
        checksums.check(tmp_path)


def test_a_process_that_cannot_see_the_list_of_files_yet_waits_for_it(folder, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(checksums.time, "monotonic", lambda: clock[0])

    def sleep(seconds):
        clock[0] += seconds
        if clock[0] > 5:
            checksums.record(folder, PARTS, folder / "sums", 0, 2)

    monkeypatch.setattr(checksums.time, "sleep", sleep)
    checksums.record(folder, PARTS, folder / "sums", 1, 2)
    assert damage(folder, 2) == ["", ""]
    monkeypatch.setattr(checksums.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    with pytest.raises(TimeoutError, match=r"elsewhere/files\.json, which process 0 writes, did not appear"):
        checksums.record(folder, PARTS, folder / "elsewhere", 1, 2)


def test_files_are_on_disk_before_their_checksums(folder, monkeypatch):
    done = []
    sync, replace = os.fsync, Path.replace

    def synced(descriptor):
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def replaced(path, target):
        done.append(f"-> {target}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    checksums.record(folder, PARTS, folder / "sums")
    sums = folder / "sums"
    last = done.index(f"-> {sums}/0-of-1.json")
    assert done[last - 1 : last + 2] == [f"{sums}/0-of-1.new", f"-> {sums}/0-of-1.json", f"{sums}"]
    first = done.index(f"-> {sums}/files.json")
    assert done[first - 1 : first + 2] == [f"{sums}/files.new", f"-> {sums}/files.json", f"{sums}"]
    names = {"5", "5/d", "arrays", "arrays/5", "5/a", "5/d/b", "5/d/c", "5/empty", "arrays/5/x"}
    assert {str(folder), *(f"{folder}/{name}" for name in names)} <= {*done[:last]}


def test_a_checkpoint_is_complete_when_all_processes_have_recorded_their_shares(folder):
    sums = folder / "sums"
    record(folder, 2)
    checksums.wait_for_all(sums, 2, 0)
    (sums / "1-of-2.json").unlink()
    with pytest.raises(TimeoutError, match=r"1-of-2.json, which process 1 writes, did not appear within 0 s"):
        checksums.wait_for_all(sums, 2, 0)
