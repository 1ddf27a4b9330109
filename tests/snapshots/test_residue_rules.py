"""Rules about what is left out of a layer."""

from __future__ import annotations

import pytest

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
