"""Environments: content-addressed layers, their mounts on this node, and the writable folders of sandboxes."""

from __future__ import annotations

from dsec.environments.blobcache import StoreSettings
from dsec.environments.build import BuildProgress, build
from dsec.environments.environment import EnvironmentStore, ResolvedEnvironment, ResolvedLayer
from dsec.environments.scratch import ScratchStore

__all__ = ["BuildProgress", "EnvironmentStore", "ResolvedEnvironment", "ResolvedLayer", "ScratchStore", "StoreSettings", "build"]
