"""A step that would touch a wrong page is refused before the device sees it."""

import pytest

from jaxkv.engine.engine import Prompt
from jaxkv.engine.sampling_params import SamplingParams
from jaxkv.errors import JaxkvError


def engine_with_one_request(bench):
    engine = bench.engine()
    engine.add_request(
        Prompt(token_ids=range(20, 40)), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    )
    engine.step()
    return engine


def full_manager(engine):
    """The manager of the layers that keep everything."""
    return next(m for m in engine.cache_manager.managers if m.spec.kind == "full")


@pytest.mark.parametrize("wrong_id", [-1, 10**6])
def test_a_block_id_outside_the_pool_is_refused(bench, wrong_id):
    engine = engine_with_one_request(bench)
    full_manager(engine).ids[0, 0, 0] = wrong_id
    with pytest.raises(JaxkvError, match=f"block id {wrong_id} at entry 0"):
        engine.step()


def test_a_block_that_is_missing_is_refused(bench):
    engine = engine_with_one_request(bench)
    manager = full_manager(engine)
    manager.ids[:, 0, manager.count[0] - 1] = 0
    with pytest.raises(JaxkvError, match="but its blocks of group"):
        engine.step()
