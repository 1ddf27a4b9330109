"""The API server: REST and WebSockets over one edge."""

from dsec.apiserver.app import create_app
from dsec.apiserver.server import ApiServer, serve

__all__ = ["ApiServer", "create_app", "serve"]
