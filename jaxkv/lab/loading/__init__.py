"""From files to traces: a loader for each format, and the one that is meant where nobody says."""

from jaxkv.lab.loading.formats import FORMATS, load_trace

__all__ = ["FORMATS", "load_trace"]
