"""Settings that hold for every test: no accelerator is looked for."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
