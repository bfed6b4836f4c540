import jax
import numpy as np

from jaxkv.engine.buckets import Bucket
from jaxkv.engine.step_inputs import BlockTableShape, StateTableShape, StepShape


def test_what_the_host_writes_to_views_is_what_the_device_reads():
    shape = StepShape(Bucket(5, 3, False), (BlockTableShape(4), StateTableShape(2, 3), BlockTableShape(2)))
    words = np.zeros(shape.num_words, np.int32)
    views = shape.views(words)
    rng = np.random.default_rng(0)
    for view in views.values():
        view[...] = rng.integers(0, 2**31, view.shape).astype(view.dtype)
    views["temperature"][:] = [0.0, 0.7, 1e-30]
    views["uniform"][:] = [0.0, 0.5, 0.999]
    inputs = jax.jit(shape.unpack)(words)
    batch, tables, sampling = inputs.batch, inputs.tables, inputs.sampling
    seen = {
        **{name: getattr(batch, name) for name in ("positions", "seq_ids", "query_starts", "seq_lens")},
        **{"num_decodes": batch.num_decodes, "num_seqs": batch.num_seqs},
        **{
            f"{name}.{group}": array
            for group, table in enumerate(tables)
            for name, array in vars(table).items()
        },
        **sampling._asdict(),
        **{
            name: getattr(inputs, name)
            for name in ("tokens", "carried", "sampled", "num_samples", "wants_logprobs")
        },
    }
    assert seen.keys() == views.keys()
    for name, view in views.items():
        assert seen[name].dtype == view.dtype
        np.testing.assert_array_equal(seen[name], view)


def test_views_cover_the_buffer_without_overlap():
    shape = StepShape(Bucket(2, 2, True), (BlockTableShape(3), StateTableShape(0, 1)))
    words = np.zeros(shape.num_words, np.int32)
    for view in shape.views(words).values():
        view.view(np.int32)[...] += 1
    assert (words == 1).all()
