"""Where layers come from: archives, images, folders, repositories, Debian. Each is read once, forwards, and becomes trees."""

from __future__ import annotations

from dsec.environments.sources.fetch import SCHEMES, Fetched, Source, fetch_source, parse_source
from dsec.environments.sources.registry import RegistryOptions
from dsec.environments.sources.workbench import Workbench, data_bytes

__all__ = ["SCHEMES", "Fetched", "RegistryOptions", "Source", "Workbench", "data_bytes", "fetch_source", "parse_source"]
