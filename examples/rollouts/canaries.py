"""Tests of known outcome under names that nobody can know, run among the real ones.

Code under test may patch the test framework so that all tests pass. It then passes the ones that must fail too, and gives itself away.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
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


_MODULES = 4


@dataclass(frozen=True, slots=True)
class Canaries:
    """Modules by name with their text, and what each of their tests must be reported as."""

    modules: dict[str, str]
    expected: dict[str, str]

    def among(self, modules: Sequence[str]) -> list[str]:
        """The modules, with these at places of chance between them."""
        mixed = list(modules)
        for name in self.modules:
            mixed.insert(secrets.randbelow(len(mixed) + 1), name)
        return mixed


def draw() -> Canaries:
    """A fresh set, spread over several modules so that a patch that is undone half-way is seen too."""
    chooser = random.SystemRandom()
    bodies = [(outcome, body) for outcome, choices in _BODIES.items() for body in choices]
    chooser.shuffle(bodies)
    modules, expected = {}, {}
    for index in range(_MODULES):
        suffix = secrets.token_hex(4)
        module, case = f"test_{suffix}", f"C{suffix}Test"
        methods = []
        for outcome, body in bodies[index::_MODULES]:
            name = f"test_{secrets.token_hex(4)}"
            first, second = chooser.sample(range(1000, 10_000), 2)
            methods.append(f"    def {name}(self):\n        {body.format(a=first, b=second)}\n")
            expected[f"{module}.{case}.{name}"] = outcome
        modules[module] = f"import unittest\n\n\nclass {case}(unittest.TestCase):\n" + "\n".join(methods)
    return Canaries(modules, expected)
