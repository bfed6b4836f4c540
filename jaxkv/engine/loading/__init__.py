"""Reading models from files."""

from jaxkv.engine.loading.load import load_model
from jaxkv.engine.loading.loaded_model import LoadedModel

__all__ = ["LoadedModel", "load_model"]
