"""Changed source is looked at before it is run."""

from __future__ import annotations

import pytest

from examples.rollouts.screen import objections

PRISTINE = {"a.py": b"import time\nfrom . import keys\n\n\ndef f(x):\n    return getattr(x, 'y', None)\n"}


@pytest.mark.parametrize(
    ("code", "use"),
    [
        ("import os", "module os"),
        ("import unittest.case as u", "module unittest"),
        ("from sys import modules", "module sys"),
        ("def f():\n    import gc", "module gc"),
        ("__import__('o' + 's')", "__import__"),
        ("exec('x')", "exec"),
        ("().__class__.__base__.__subclasses__()", "attribute __subclasses__"),
        ("def g():\n    try:\n        1/0\n    except Exception as e:\n        e.__traceback__.tb_frame.f_back", "attribute f_back"),
    ],
)
def test_reaching_for_the_interpreter_is_objected_to(code: str, use: str) -> None:
    (objection,) = objections({"a.py": code.encode()}, PRISTINE)
    assert use in objection.removeprefix("a.py uses ").split(", ")


@pytest.mark.parametrize(
    "code",
    [
        "import heapq\nimport time\n",
        "from . import os_like\n",
        "def f(x):\n    return getattr(x, 'z')\n",
        "class A:\n    size = 3\n",
        "not python (",
    ],
)
def test_honest_code_is_not_objected_to(code: str) -> None:
    assert objections({"a.py": code.encode()}, PRISTINE) == []
