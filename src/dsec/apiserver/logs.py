"""Logs: one JSON object a line on stderr. Requests are not logged unless asked for, bodies, headers and queries never."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog

__all__ = ["configure_logging"]


def configure_logging(level: str = "info", stream: TextIO | None = None) -> None:
    """Set structlog and the standard library's logging (uvicorn's) up for a daemon. Call once, at the start of the process."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        # As plain text: the rich renderer shows local variables, which hold tokens and environments.
        structlog.processors.format_exc_info,
    ]
    out = stream or sys.stderr
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, structlog.processors.JSONRenderer()],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(number)
    # These tell each connection and WebSocket at info.
    logging.getLogger("uvicorn.error").setLevel(max(number, logging.WARNING))
    logging.getLogger("asyncio").setLevel(max(number, logging.WARNING))
