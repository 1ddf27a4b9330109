"""Tests of known outcome under names that nobody can know, run among the real ones.

Code under test may patch the test framework so that all tests pass. It then passes the ones that must fail too, and gives itself away.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass

__all__ = ["Canaries", "draw"]

# Each is a way that a real test fails; patching one of them away must not go unseen.
_BODIES = {
    "failed": [
        "self.assertEqual({a}, {b})",
        "self.assertTrue({a} == {b})",
        "self.assertIn({a}, [{b}])",
        "self.assertIsNone({a})",
        "assert {a} == {b}",
        "self.fail({a})",
        "with self.assertRaises(ValueError):\n            int({a})",
        "with self.subTest(n={a}):\n            self.assertEqual({a}, {b})",
    ],
    "error": ["raise RuntimeError({a})", "[][{a}]"],
    "passed": ["self.assertEqual({a}, {a})", "with self.assertRaises(ValueError):\n            raise ValueError({b})"],
    "skipped": ["self.skipTest(str({a}))"],
}


@dataclass(frozen=True, slots=True)
class Canaries:
    """A module's name and text, and what its tests must be reported as."""

    module: str
    text: str
    expected: dict[str, str]


def draw(example: str) -> Canaries:
    """A fresh set. `example` is the id of a real test: the canaries' names are shaped like its."""
    chooser = random.SystemRandom()
    suffix = secrets.token_hex(4)
    module, case = f"test_{suffix}", f"Cache{suffix.title()}Test"
    stem = example.rpartition(".")[2] or "test"
    methods, expected = [], {}
    bodies = [(outcome, body) for outcome, choices in _BODIES.items() for body in choices]
    chooser.shuffle(bodies)
    for outcome, body in bodies:
        name = f"{stem}_{secrets.token_hex(4)}"
        first, second = chooser.sample(range(1000, 10_000), 2)
        methods.append(f"    def {name}(self):\n        {body.format(a=first, b=second)}\n")
        expected[f"{module}.{case}.{name}"] = outcome
    text = f"import unittest\n\n\nclass {case}(unittest.TestCase):\n" + "\n".join(methods)
    return Canaries(module, text, expected)
