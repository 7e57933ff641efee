"""The kernels in every build that this machine runs: its own always, the others when slow ones do.

Each is compiled once, ten seconds, and found again in the cache.
"""

from collections.abc import Iterator

import pytest

from engine.ops.cpu import instruction_sets as sets
from tests.engine.ops_cpu.kernels import Kernels

OWN = sets.of_this_machine()


def runnable() -> list[sets.InstructionSet]:
    """The builds below the machine's own."""
    features = sets.cpu_features()
    found = [sets.PORTABLE]
    if {"avx2", "fma", "f16c"} <= features:
        found.append(sets.AVX2)
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= features:
        found.append(sets.AVX512)
    if {"avx512_vnni", "avx512_bf16"} <= features:
        found.append(sets.AVX512_VNNI_BF16)
    return [one for one in found if one != OWN]


def builds() -> list[object]:
    others = [pytest.param(one, id=one.name, marks=pytest.mark.slow) for one in runnable()]
    # Compiling may take longer on a loaded machine than a test may.
    return [pytest.param(OWN, id=OWN.name), *others]


@pytest.fixture(scope="session", params=builds())
def instruction_set(request: pytest.FixtureRequest) -> sets.InstructionSet:
    return request.param


@pytest.fixture(scope="session")
def kernels(instruction_set: sets.InstructionSet) -> Iterator[Kernels]:
    opened = Kernels(instruction_set, threads=1)
    yield opened
    opened.close()
