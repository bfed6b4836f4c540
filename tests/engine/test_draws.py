import numpy as np

from jaxkv.engine.draws import uniform_draws


def splitmix64(state):
    """The published generator in plain integers: the next output for a state already advanced."""
    mask = 2**64 - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_draws_are_splitmix64_in_plain_integers():
    gamma = 0x9E3779B97F4A7C15
    # The first outputs of SplitMix64 from state 0, as published with its reference implementation.
    assert [splitmix64(gamma * n) for n in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    for seed, position in [(0, 0), (1, 7), (2**32 - 1, 2**31 - 1)]:
        bits = splitmix64(splitmix64(seed * gamma + gamma) + (position + 1) * gamma)
        [draw] = uniform_draws(np.array([seed], np.uint32), np.array([position], np.int32))
        assert draw == (bits >> 40) / 2**24


def test_draws_spread_evenly_over_seeds_and_over_positions():
    many = np.arange(100_000)
    for seeds, positions in [(many, 0 * many), (0 * many, many)]:
        draws = uniform_draws(seeds.astype(np.uint32), positions.astype(np.int32))
        counts = np.histogram(draws, bins=100, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 5 * np.sqrt(2 * 99)
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02
