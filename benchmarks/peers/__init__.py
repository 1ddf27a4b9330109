"""The peers: other ways to run a command in a container of the same root on the same host, measured in the same run."""

from __future__ import annotations

from benchmarks.peers.base import Peer, PeerUnavailable
from benchmarks.peers.bubblewrap import Bubblewrap
from benchmarks.peers.docker import Docker, DockerCommand
from benchmarks.peers.podman import Podman

__all__ = ["PEERS", "Bubblewrap", "Docker", "DockerCommand", "Peer", "PeerUnavailable", "Podman"]

PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (Docker, DockerCommand, Podman, Bubblewrap)}
