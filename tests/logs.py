"""What is logged while something runs."""

import logging

from contextlib import contextmanager

__all__ = ["logged_warnings"]


@contextmanager
def logged_warnings():
    """Collect what PyMC and this package log as a warning or worse, each text once."""
    texts = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("pymc", "pymc_sghmc")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield texts
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        texts[:] = dict.fromkeys(texts)
