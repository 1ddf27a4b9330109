"""The budgets that the project set itself, and how a measurement stands against one."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["at_least", "at_most"]


def _judge(measured: float | None, limit: float, unit: str, *, ratio: float, sign: str) -> dict[str, Any]:
    document: dict[str, Any] = {"budget": f"{sign} {limit:g} {unit}".strip(), "measured": measured, "met": False}
    if measured is None or math.isnan(measured):
        document["missed_by"] = "not measured"
    elif ratio <= 1:
        document["met"] = True
        document["headroom_percent"] = round((1 - ratio) * 100, 1)
    else:
        document["missed_by"] = f"{abs(measured - limit):.3g} {unit} ({abs(measured - limit) / limit * 100:.0f} %)".replace("  ", " ")
    return document


def at_most(measured: float | None, limit: float, unit: str = "") -> dict[str, Any]:
    """The budget is a ceiling. A `limit` of 0 is met by 0 alone."""
    ratio = math.inf if measured is None else (measured / limit if limit else (0.0 if measured == 0 else math.inf))
    if limit == 0 and measured:
        return {"budget": f"<= 0 {unit}".strip(), "measured": measured, "met": False, "missed_by": f"{measured:g} {unit}".strip()}
    return _judge(measured, limit, unit, ratio=ratio, sign="<=")


def at_least(measured: float | None, limit: float, unit: str = "") -> dict[str, Any]:
    """The budget is a floor."""
    ratio = math.inf if not measured else limit / measured
    return _judge(measured, limit, unit, ratio=ratio, sign=">=")
