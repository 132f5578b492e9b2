"""Log lines of the daemons: one event, one line, on stderr. Libraries only call `logging`."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

ROOT = "mooncake_py"


class OneLine(logging.Formatter):
    """`2026-01-31T12:00:00.250Z INFO master.server text`; line breaks inside become `\\n`."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        name = record.name.removeprefix(ROOT + ".")
        text = record.getMessage()
        if record.exc_info:
            text += " | " + self.formatException(record.exc_info)
        stamp = f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"
        return f"{stamp} {record.levelname} {name} {text}".replace("\n", "\\n")


def setup(level: str) -> None:
    """Send this package's log lines to stderr. Called by a daemon's main, once."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine())
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    logging.raiseExceptions = False  # a closed stderr must not end a daemon
