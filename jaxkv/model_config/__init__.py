"""From a model's configuration file to the specs of its layers, without its weights."""

from jaxkv.model_config.model_cache import ModelCache as ModelCache
from jaxkv.model_config.model_cache import read_model_cache as read_model_cache
