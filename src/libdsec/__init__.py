"""libdsec: the SDK of DSec."""
