"""What is carried out of an agent's sandbox, and what a hostile tree gets."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from examples.rollouts.carry import Changes, Limits, Unacceptable, collect
from libdsec import NotFound
from libdsec.schema import FileStat

PRISTINE = {"__init__.py": b"x = 1\n", "keys.py": b"y = 2\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    for name, content in PRISTINE.items():
        (package / name).write_bytes(content)
    return package


@pytest.fixture
def files(folder: Path, request: pytest.FixtureRequest) -> object:
    return request.getfixturevalue("local_files")(folder)


async def _collect(files: object, folder: Path, **limits: float) -> Changes:
    return await collect(files, str(folder), PRISTINE, Limits(**limits))  # type: ignore[arg-type]


async def test_an_untouched_tree_carries_nothing(files: object, folder: Path) -> None:
    assert await _collect(files, folder) == Changes()


async def test_changed_new_and_removed_files_are_carried(files: object, folder: Path) -> None:
    (folder / "__init__.py").write_bytes(b"x = 3\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "more.py").write_bytes(b"")
    (folder / "keys.py").unlink()
    assert await _collect(files, folder) == Changes({"__init__.py": b"x = 3\n", "sub/more.py": b""}, ("keys.py",))


@pytest.mark.parametrize(
    "name", ["conftest.py", "sitecustomize.py", "usercustomize.py", "test_new.py", "tests/deep.py", "a-b.py", "sub/conftest.py"]
)
async def test_files_that_tools_pick_up_stay_behind(files: object, folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("import os\n")
    changes = await _collect(files, folder)
    assert changes.written == {}
    assert changes.left_behind == (f"{name}: not a name of a source file",)


@pytest.mark.parametrize("name", ["x.pth", "keys.pyc", "keys.so", "data.json", ".hidden"])
async def test_files_that_are_no_source_stay_behind(files: object, folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"anything")
    assert (await _collect(files, folder)).written == {}


@pytest.mark.parametrize("target", ["/etc/shadow", "../../secret.py", "keys.py", "/nonexistent"])
async def test_a_link_in_place_of_a_source_file_is_unacceptable(files: object, folder: Path, target: str) -> None:
    (folder / "__init__.py").unlink()
    (folder / "__init__.py").symlink_to(target)
    with pytest.raises(Unacceptable, match=r"__init__\.py is a symlink"):
        await _collect(files, folder)


async def test_a_link_with_another_name_stays_behind_and_is_not_followed(files: object, folder: Path) -> None:
    (folder / "everything").symlink_to("/")
    changes = await _collect(files, folder)
    assert changes == Changes(left_behind=("everything: a symlink",))


async def test_a_pipe_in_place_of_a_source_file_is_unacceptable_and_not_opened(files: object, folder: Path) -> None:
    (folder / "keys.py").unlink()
    os.mkfifo(folder / "keys.py")
    with pytest.raises(Unacceptable, match=r"keys\.py is a fifo"):
        await _collect(files, folder)


async def test_a_file_above_its_bound_is_unacceptable_without_being_read(files: object, folder: Path) -> None:
    with (folder / "huge.py").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(Unacceptable, match=r"huge\.py is 1099511627776 bytes large"):
        await _collect(files, folder)


async def test_too_many_changed_files_are_unacceptable(files: object, folder: Path) -> None:
    for number in range(9):
        (folder / f"m{number}.py").touch()
    with pytest.raises(Unacceptable, match="9 files are changed, more than 8"):
        await _collect(files, folder, changed_files=8)


async def test_too_many_bytes_together_are_unacceptable(files: object, folder: Path) -> None:
    for number in range(3):
        (folder / f"m{number}.py").write_bytes(b"#" * 90)
    with pytest.raises(Unacceptable, match="larger than 200 bytes together"):
        await _collect(files, folder, file_bytes=100, total_bytes=200)


async def test_too_many_entries_are_unacceptable(files: object, folder: Path) -> None:
    for number in range(20):
        (folder / f"{number}.txt").touch()
    with pytest.raises(Unacceptable, match="holds 22 entries, more than 10"):
        await _collect(files, folder, entries=10)


async def test_a_file_that_grows_between_listing_and_reading_is_unacceptable(files: object, folder: Path) -> None:
    files.before_read = [("keys.py", b"#" * 200)]  # type: ignore[attr-defined]
    with pytest.raises(Unacceptable, match="grew from 6 to over 100 bytes"):
        await _collect(files, folder, file_bytes=100)


async def test_a_file_swapped_for_a_pipe_after_listing_does_not_hang(files: object, folder: Path) -> None:
    listed = await files.list(str(folder), recursive=True)  # type: ignore[attr-defined]

    async def stale(path: str, *, recursive: bool = False) -> list[FileStat]:
        return listed

    files.list = stale  # type: ignore[attr-defined]
    (folder / "keys.py").unlink()
    os.mkfifo(folder / "keys.py")
    with pytest.raises(Unacceptable, match=r"cannot be read within 0\.1 s"):
        await _collect(files, folder, read_seconds=0.1)


@pytest.mark.parametrize("method", ["list", "stream"])
async def test_a_tree_that_is_gone_is_the_agents_doing_and_no_failure(
    files: object, folder: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: object, **__: object) -> list[FileStat]:
        raise NotFound("path: not there")

    async def gone_while_read(_: str) -> AsyncIterator[bytes]:
        raise NotFound("path: not there")
        yield b""

    monkeypatch.setattr(files, method, gone if method == "list" else gone_while_read)
    with pytest.raises(Unacceptable, match="path: not there"):
        await _collect(files, folder)


@pytest.mark.parametrize("path", ["/etc/passwd.py", "{folder}/../other.py", "{folder}x/a.py"])
async def test_a_listing_that_leads_outside_is_unacceptable(folder: Path, files: object, path: str) -> None:
    async def lying(_path: str, *, recursive: bool = False) -> list[FileStat]:
        return [FileStat(path=path.format(folder=folder), kind="file", size=1, mode=0o644, uid=0, gid=0, mtime=0.0)]

    files.list = lying  # type: ignore[attr-defined]
    with pytest.raises(Unacceptable, match="is not below"):
        await _collect(files, folder)
