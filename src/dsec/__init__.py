"""DSec: the daemons, backends and environments behind `libdsec`."""
