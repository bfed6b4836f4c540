"""The random number behind each sampled token: a hash of the request's seed and the token's position, so that
it does not depend on what else is in the batch, on the step, or on the library's version.
"""

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniform_draws(seeds: NDArray[np.uint32], positions: NDArray[np.int32]) -> NDArray[np.float32]:
    """float32[n] in [0, 1), multiples of 2^-24, for seeds uint32[n] and positions int32[n].

    The seed chooses a stream of SplitMix64 (https://doi.org/10.1145/2660193.2660195) and the position the
    element
    of it: the mixing function is applied once to the seed and once to the sum.
    """
    stream = _mix(seeds.astype(np.uint64) * _GAMMA + _GAMMA)
    bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
