"""Signal numbers of Linux by name, whatever system the caller runs on."""

from __future__ import annotations

from libdsec.errors import InvalidArgument

__all__ = ["signal_number"]

_NAMES = [
    *["HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM", "TERM", "STKFLT"],
    *["CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS"],
]
_BY_NAME = {name: number for number, name in enumerate(_NAMES, start=1)} | {"IOT": 6, "CLD": 17, "POLL": 29}
_HIGHEST = 64


def signal_number(signal: int | str) -> int:
    """15 for 15, "15", "TERM", "term" and "SIGTERM". InvalidArgument for what no signal is called."""
    if isinstance(signal, str):
        text = signal.strip().upper()
        if text.isdigit():
            signal = int(text)
        else:
            number = _BY_NAME.get(text.removeprefix("SIG"))
            if number is None:
                raise InvalidArgument(f"no signal is called {signal!r}", field="signal")
            return number
    if not 1 <= signal <= _HIGHEST:
        raise InvalidArgument(f"signal {signal} is not between 1 and {_HIGHEST}", field="signal")
    return signal
