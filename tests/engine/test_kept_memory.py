"""Memory that was freed once is had again without new pages."""

import platform
import subprocess
import sys

import pytest

FILL_AND_FREE = """
import ctypes, resource
from jaxkv.engine.kept_memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def faults_of(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert keep_freed_memory()
print(*(faults_of(64 * 2**20) for _ in range(3)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_pages_of_a_freed_block_are_not_cleared_again():
    ran = subprocess.run([sys.executable, "-c", FILL_AND_FREE], capture_output=True, text=True, check=True)
    first, *later = map(int, ran.stdout.split())
    assert first > 100 * max(later)
