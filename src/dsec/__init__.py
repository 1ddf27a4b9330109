"""DSec: the daemons, backends and environments behind `libdsec`."""

__version__ = "0.1.0"
