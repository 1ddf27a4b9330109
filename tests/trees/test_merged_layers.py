"""Merged trees are what overlayfs shows of their layers."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from forest import PHASES, Packs, file, image_mounted, looks, overlay_mounted, seen, trees
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.environments.trees import (
    OPAQUE,
    ORIGIN,
    REDIRECT,
    Node,
    collapse,
    folder,
    keep_overlay_marks,
    merge,
    settle,
    walk,
    whiteout,
)


def _inline(pieces: Any, size: int | None = None) -> tuple[int, bytes, tuple[()]]:
    data = b"".join(bytes(piece) for piece in pieces)
    return len(data), data, ()


def _of(entries: dict[str, Any], **xattrs: bytes) -> Node:
    """A tree: dicts are folders, bytes are files, None is a whiteout; keys with a `!` are opaque, `name>path` are redirects."""
    root = folder()
    for text, value in entries.items():
        name, _, redirect = text.partition(">")
        if isinstance(value, dict):
            node = _of(value)
            if name.endswith("!"):
                name = name[:-1]
                node.xattrs[OPAQUE] = b"y"
            if redirect:
                node.xattrs[REDIRECT] = redirect.encode()
        else:
            node = whiteout() if value is None else file(value)
        assert root.children is not None
        root.children[name.encode()] = node
    return root


def _names(tree: Node) -> dict[str, Any]:
    """The other way round."""
    found: dict[str, Any] = {}
    for name, child in sorted((tree.children or {}).items()):
        text = name.decode()
        if child.children is None:
            found[text] = None if child.inline is None else child.inline
            continue
        if child.xattrs.get(OPAQUE):
            text += "!"
        if REDIRECT in child.xattrs:
            text += ">" + child.xattrs[REDIRECT].decode()
        found[text] = _names(child)
    return found


@pytest.mark.parametrize(
    ("lower", "upper", "above", "bottom"),
    [
        ({"a": b"1"}, {"a": None}, {"a": None}, {}),
        ({"a": b"1", "b": b"2"}, {"a": b"3"}, {"a": b"3", "b": b"2"}, {"a": b"3", "b": b"2"}),
        ({"d": {"a": b"1"}}, {"d": {"b": b"2"}}, {"d": {"a": b"1", "b": b"2"}}, {"d": {"a": b"1", "b": b"2"}}),
        ({"d": {"a": b"1"}}, {"d!": {"b": b"2"}}, {"d!": {"b": b"2"}}, {"d": {"b": b"2"}}),
        ({"d!": {"a": b"1"}}, {"d": {"b": b"2"}}, {"d!": {"a": b"1", "b": b"2"}}, {"d": {"a": b"1", "b": b"2"}}),
        ({"d": b"file"}, {"d": {"b": b"2"}}, {"d!": {"b": b"2"}}, {"d": {"b": b"2"}}),
        ({"d": None}, {"d": {"b": b"2"}}, {"d!": {"b": b"2"}}, {"d": {"b": b"2"}}),
        ({"d": {"a": b"1"}}, {"d": b"file"}, {"d": b"file"}, {"d": b"file"}),
        ({}, {"d!": {"e": {"gone": None}}}, {"d!": {"e": {}}}, {"d": {"e": {}}}),
        ({"a": {"x": b"1"}}, {"a": None, "b>a": {"y": b"2"}}, {"a": None, "b>/a": {"x": b"1", "y": b"2"}}, {"b": {"x": b"1", "y": b"2"}}),
        ({"a": {"x": b""}}, {"d": {"b>/a": {}}}, {"a": {"x": b""}, "d": {"b>/a": {"x": b""}}}, {"a": {"x": b""}, "d": {"b": {"x": b""}}}),
        ({"a": {"s": {"x": b"1"}}}, {"d!": {"b>/a/s": {}}}, {"a": {"s": {"x": b"1"}}, "d!": {"b>/a/s": {"x": b"1"}}}, None),
        ({"a>/z": {"x": b"1"}}, {"b>/a/q": {}}, {"a>/z": {"x": b"1"}, "b>/z/q": {}}, None),
        ({"a!": {"x": b"1"}}, {"b>/a/q": {}}, {"a!": {"x": b"1"}, "b!": {}}, None),
        ({"p>/z": {"s>t": {}}}, {"b>/p/s": {}}, {"p>/z": {"s>t": {}}, "b>/z/t": {}}, None),
    ],
)  # fmt: skip
def test_two_layers(lower: dict[str, Any], upper: dict[str, Any], above: dict[str, Any], bottom: dict[str, Any] | None) -> None:
    assert _names(merge(_of(lower), _of(upper), keep_whiteouts=True)) == above
    if bottom is not None:
        assert _names(merge(_of(lower), _of(upper), keep_whiteouts=False)) == bottom


@pytest.mark.parametrize("redirect", [b"/", b"", b"a/b", b"//a", b"/a/", b"a\0"])
def test_a_redirect_that_is_none_is_refused(redirect: bytes) -> None:
    upper = _of({"d": {}})
    upper.children[b"d"].xattrs[REDIRECT] = redirect
    with pytest.raises(ValueError, match="redirect"):
        merge(_of({}), upper, keep_whiteouts=True)


def test_hard_links_and_inputs_survive() -> None:
    lower, upper = _of({"d": {"a": b"1"}}), _of({"d": {"new": b"2"}})
    lower.children[b"again"] = lower.children[b"d"].children[b"a"]
    before = looks(lower), looks(upper)
    merged = merge(lower, upper, keep_whiteouts=False)
    assert merged.children[b"again"] is merged.children[b"d"].children[b"a"]
    assert (looks(lower), looks(upper)) == before


def test_an_opaque_root_hides_all_below() -> None:
    """As images can say it, though overlayfs itself takes no notice."""
    lowest, lower, upper = _of({"a": b"1"}), _of({"b": b"2"}), _of({"c": b"3", "d>/b": {}})
    lower.xattrs[OPAQUE] = b"y"
    assert _names(collapse([lowest, lower, upper], keep_whiteouts=False)) == {"b": b"2", "c": b"3", "d": {}}
    group = collapse([lower, upper], keep_whiteouts=True)
    assert _names(merge(lowest, group, keep_whiteouts=False)) == {"b": b"2", "c": b"3", "d": {}}


def test_whiteouts_are_kept_where_they_may_hide_and_marked() -> None:
    layer = settle(_of({"d": {"a": None, "e!": {"b": None, "f": {"c": None}}}}), keep_whiteouts=True)
    assert _names(layer) == {"d": {"a": None, "e!": {"f": {}}}}
    assert ORIGIN in layer.children[b"d"].xattrs
    assert ORIGIN not in layer.xattrs
    assert settle(layer, keep_whiteouts=True) is layer
    assert _names(settle(layer, keep_whiteouts=False)) == {"d": {"e": {"f": {}}}}


def test_a_chain_of_a_thousand_folders() -> None:
    lower, upper = folder(), folder()
    for root in (lower, upper):
        for _ in range(2000):
            below = folder()
            root.children[b"d"] = below
            root = below
    assert len(looks(merge(lower, upper, keep_whiteouts=False))) == 2001


# -- against the kernel ----------------------------------------------------------------------------------------------------------------

_letters = st.text("abc", min_size=1, max_size=1)
_paths = st.lists(_letters, min_size=1, max_size=3).map("/".join)
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("mkdir"), _paths),
        st.tuples(st.just("write"), _paths, st.binary(max_size=5)),
        st.tuples(st.just("remove"), _paths),
        st.tuples(st.just("move"), _paths, _paths),
        st.tuples(st.just("move"), _paths, _paths),
        st.tuples(st.just("link"), _paths, _paths),
        st.tuples(st.just("chmod"), _paths, st.integers(0o700, 0o777)),
    ),
    max_size=12,
)


def _perform(root: Path, step: tuple[Any, ...]) -> None:
    """One thing that a guest does; what it may not do is left out."""
    verb, path = step[0], root / step[1]
    with contextlib.suppress(OSError):
        if verb == "mkdir":
            path.mkdir(parents=True)
        elif verb == "write":
            # of a pipe nobody waits for the other end
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
            with os.fdopen(fd, "wb", buffering=0) as opened:
                opened.write(step[2])
        elif verb == "remove":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif verb == "move":
            path.rename(root / step[2])
        elif verb == "link":
            os.link(path, root / step[2])
        else:
            path.chmod(step[2])


def _content_only(view: dict[bytes, tuple[Any, ...]]) -> dict[bytes, tuple[Any, ...]]:
    return {path: (*row[:6], ()) for path, row in view.items()}


@pytest.mark.root
@pytest.mark.slow
@settings(max_examples=40, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(base=st.data(), layers=st.lists(_steps, min_size=1, max_size=4))
def test_guests_changes_merge_to_what_they_saw(base: st.DataObject, layers: list[list[tuple[Any, ...]]], packs: Packs) -> None:
    """Each layer is what a guest did on top of all before: the upper folder of a real overlay, renamed folders and all."""
    stack: list[Node] = [settle(base.draw(trees(packs, largest=10)), keep_whiteouts=False)]
    with contextlib.ExitStack() as kept:
        place = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="dsec-trees-")))
        lowers = [kept.enter_context(image_mounted(stack[0], packs, place / "base"))]
        for number, steps in enumerate(layers):
            # not on a disk: an overlay that goes waits for its upper folder's file system to be written
            home = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="dsec-trees-", dir="/dev/shm")))
            (home / "upper").mkdir()
            (home / "work").mkdir()
            with overlay_mounted(lowers, home / "merged", home / "upper", home / "work") as merged:
                for step in steps:
                    _perform(merged, step)
            stack.append(settle(walk(home / "upper", _inline, keep_xattr=keep_overlay_marks), keep_whiteouts=True))
            lowers.append(kept.enter_context(image_mounted(stack[-1], packs, place / str(number))))
        # links that were broken apart by a change have fewer names, which overlayfs does not notice: contents are compared
        view = _content_only(_shown(lowers, place / "view"))
        assert _content_only(looks(collapse(stack, keep_whiteouts=False), packs)) == view
        for cut in range(1, len(stack)):
            group = collapse(stack[cut:], keep_whiteouts=True)
            below = collapse(stack[:cut], keep_whiteouts=False)
            assert _content_only(looks(merge(below, group, keep_whiteouts=False), packs)) == view
            top = kept.enter_context(image_mounted(group, packs, place / f"group{cut}"))
            assert _content_only(_shown([*lowers[:cut], top], place / f"view{cut}")) == view


def _shown(lowers: list[Path], target: Path) -> dict[bytes, tuple[Any, ...]]:
    with overlay_mounted(lowers, target) as merged:
        return seen(merged, count_links=False)


_layer = st.recursive(
    st.one_of(st.binary(max_size=2), st.none()),
    lambda below: st.dictionaries(st.one_of(_letters, _letters.map(lambda letter: letter + "!")), below, max_size=3),
    max_leaves=8,
)
_layers = st.dictionaries(_letters, _layer, max_size=3).map(_of)


@pytest.mark.root
@pytest.mark.slow
@settings(max_examples=60, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(stack=st.lists(_layers, min_size=2, max_size=4))
def test_any_layers_merge_to_what_the_kernel_shows(stack: list[Node]) -> None:
    """Layers as images bring them: whiteouts of what is not there, opaque folders within opaque ones, files over folders."""
    with contextlib.ExitStack() as kept:
        place = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="dsec-trees-")))
        settled = [collapse([tree], keep_whiteouts=True) for tree in stack]
        lowers = [kept.enter_context(image_mounted(tree, None, place / str(number))) for number, tree in enumerate(settled)]
        view = _shown(lowers, place / "view")
        assert looks(collapse(stack, keep_whiteouts=False)) == view
        top = kept.enter_context(image_mounted(collapse(stack[1:], keep_whiteouts=True), None, place / "group"))
        assert _shown([lowers[0], top], place / "again") == view
