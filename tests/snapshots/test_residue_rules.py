"""Rules about what is left out of a layer."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dsec.environments.residue import DEFAULT_RULES, Residue, check_rules
from libdsec.errors import InvalidArgument


@pytest.mark.parametrize(
    ("rule", "meant", "not_meant"),
    [
        ("/tmp/*", ["tmp/x", "tmp/.x"], ["tmp", "tmp/x/y", "a/tmp/x"]),
        ("/tmp", ["tmp"], ["tmp/x", "a/tmp"]),
        ("/build/**", ["build/a", "build/a/b"], ["build", "builds/a"]),
        ("*.pyc", ["a.pyc", "d/a.pyc", "d/e/.pyc"], ["a.pyco", "a.pyc/b"]),
        ("__pycache__/", ["__pycache__", "d/e/__pycache__"], ["__pycache__/a"]),
        ("**/cache/*", ["cache/a", "d/cache/a"], ["cache", "xcache/a"]),
        ("/home/*/.cache/pip", ["home/u/.cache/pip"], ["home/.cache/pip", "home/u/v/.cache/pip"]),
        ("/a/[!b]?", ["a/cd"], ["a/bd", "a//d", "a/c"]),
        ("/a.b+(c)", ["a.b+(c)"], ["axb+(c)"]),
        ("/n\u00e4me", ["n\u00e4me"], ["name"]),
    ],
)
def test_what_a_rule_means(rule, meant, not_meant):
    check_rules([rule])
    residue = Residue([rule])
    assert [path for path in meant if not residue.matches(path.encode())] == []
    assert [path for path in not_meant if residue.matches(path.encode())] == []


def test_no_rules_mean_nothing_and_names_that_are_no_text_are_matched():
    assert not Residue([]).matches(b"tmp/x")
    assert Residue(["*.o"]).matches(b"\xff/\xfe\n.o")


def test_default_rules_are_few_and_spare_what_people_keep():
    check_rules(DEFAULT_RULES)
    residue = Residue(DEFAULT_RULES)
    kept = [
        "root/.bashrc",
        "root/.cache/huggingface",
        "var/lib/apt/lists/x",
        "work/tmp/x",
        "usr/lib/python3/__pycache__",
        "home/u/.history",
    ]
    assert [path for path in kept if residue.matches(path.encode())] == []


@pytest.mark.parametrize("rule", ["", "/", "a/b", "/a/../b", "/a//b", "/x\0", "[z-a]", "*" * 20, "x" * 2000])
def test_what_is_no_rule_is_refused(rule):
    with pytest.raises(InvalidArgument) as refused:
        check_rules([rule])
    assert refused.value.field == "scrub"


@pytest.mark.parametrize(
    ("rule", "meant", "not_meant"),
    [
        ("/x/**/*.o", ["x/a.o", "x/a/b/c.o"], ["x.o", "x/a/b.c", "y/x/a.o"]),
        ("/a**z", ["az", "abz", "ab/z", "ab/c/d/yz"], ["a", "ab/c", "b/az"]),
        ("/a/**b/c", ["a/b/c", "a/x/yb/c"], ["a/c", "a/b/x/c"]),
        ("/**", ["a", "a/b"], []),
        ("ab*ba", ["abba", "ab/abxba"], ["aba"]),
        ("*a[bc]?*d", ["abxd", "aacxd", "xabxabd"], ["abd", "d", "axxd"]),
        ("/[^^]", ["a"], ["^"]),
    ],
)
def test_what_stars_mean(rule, meant, not_meant):
    test_what_a_rule_means(rule, meant, not_meant)


@pytest.mark.parametrize(
    ("rule", "path"),
    [
        ("*a*a*a*a*a*b", b"a" * 120),
        ("/x/**/*_*_*_*_*.o", b"x/" + b"/".join([b"_" * 200] * 3)),
        ("*-*-*-*.log", b"-" * 254),
        ("/**/a/**/a/**/a/**/a/**/a/b", b"/".join([b"a"] * 500)),
        ("/**a**a**a", b"/".join([b"a" * 255] * 200) + b"/b"),
    ],
)
def test_no_rule_takes_long_over_any_path(rule, path):
    check_rules([rule])
    residue = Residue([rule])
    began = time.thread_time()
    assert not residue.matches(path)
    assert time.thread_time() - began < 0.1


@pytest.mark.slow
@given(rule=st.text("ab*?/", min_size=1, max_size=7), path=st.text("ab/", min_size=1, max_size=7))
@settings(max_examples=400, deadline=None)
def test_rules_mean_what_their_expression_means(rule, path):
    rule = "/" + rule
    parts = path.split("/")
    try:
        check_rules([rule])
    except InvalidArgument:
        assume(False)
    assume(all(parts) and "***" not in rule)
    text = rule.rstrip("/")
    text = ("**/" + text.lstrip("/")) if "/" not in text else text.removeprefix("/")
    made = re.escape(text).replace(r"\*\*/", "(?:[^/]+/)*").replace(r"\*\*", ".*").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    # `**` before a slash, at the end of a name, is not a folder of its own
    assume("**/" not in text or all(part == "**" or "**" not in part for part in text.split("/")))
    assert Residue([rule]).matches(path.encode()) == (re.fullmatch(made, path, re.DOTALL) is not None), made
