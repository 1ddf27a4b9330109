"""The real fix as edits: applied in order they turn one tree into the other."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.rollouts.fix import Edit, edits_between


def _apply(files: dict[str, str], edits: list[Edit]) -> dict[str, str]:
    files = dict(files)
    for edit in edits:
        if not edit.old:
            assert edit.path not in files
            files[edit.path] = edit.new
        else:
            assert files[edit.path].find(edit.old) == files[edit.path].rfind(edit.old) >= 0
            files[edit.path] = files[edit.path].replace(edit.old, edit.new)
    return files


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return root


_LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", "    return 1\n", "x\r\n"]), min_size=1, max_size=12).map("".join)


@settings(max_examples=60, deadline=None)
@given(before=_LINES, after=_LINES)
def test_edits_turn_any_text_into_any_other(tmp_path_factory: pytest.TempPathFactory, before: str, after: str) -> None:
    root = tmp_path_factory.mktemp("fix")
    edits = edits_between(_write(root / "old", {"m.py": before}), _write(root / "new", {"m.py": after}))
    assert _apply({"m.py": before}, edits) == {"m.py": after}


def test_a_new_file_is_an_edit_of_nothing(tmp_path: Path) -> None:
    edits = edits_between(_write(tmp_path / "old", {"a.py": "1\n"}), _write(tmp_path / "new", {"a.py": "1\n", "sub/b.py": "2\n"}))
    assert edits == [Edit("sub/b.py", "", "2\n")]


def test_a_removed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(ValueError, match=r"a\.py is not in the newer release"):
        edits_between(_write(tmp_path / "old", {"a.py": "1\n"}), tmp_path / "new")


def test_only_python_counts(tmp_path: Path) -> None:
    assert edits_between(_write(tmp_path / "old", {"a.txt": "1\n"}), _write(tmp_path / "new", {"a.txt": "2\n"})) == []
