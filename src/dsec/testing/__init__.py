"""What ships for testing: `leaks`, what kernel objects an instance holds."""

from __future__ import annotations
