"""Which instruction sets the native kernels are compiled for, and which one this machine runs.

Knows names and compiler flags, not sources nor compilers. Called by ``build``.
"""

import ctypes
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What one shared library is compiled for."""

    name: str
    """``avx512``, ``avx2``, ``neon`` or ``portable``, with the extensions it uses after a plus."""
    flags: tuple[str, ...]
    """Compiler flags."""


PORTABLE = InstructionSet("portable", ())
AVX2 = InstructionSet("avx2", _AVX2)
AVX512 = InstructionSet("avx512", _AVX512)
AVX512_VNNI_BF16 = InstructionSet("avx512+vnni+bf16", (*_AVX512, "-mavx512vnni", "-mavx512bf16"))
AMX = InstructionSet("avx512+vnni+bf16+amx", (*AVX512_VNNI_BF16.flags, "-mamx-tile", "-mamx-bf16"))
_AMX_FEATURES = frozenset({"amx_tile", "amx_bf16", "avx512_bf16", "avx512_vnni"})


def of_this_machine() -> InstructionSet:
    """The widest that the kernels know and that processor and system run."""
    features = cpu_features()
    if not _may_use_tiles():
        features -= _AMX_FEATURES & {"amx_tile"}
    return of_machine(platform.machine(), features)


def of_machine(architecture: str, features: frozenset[str]) -> InstructionSet:
    """As ``of_this_machine``, from Linux's names of features."""
    if architecture in ("aarch64", "arm64"):
        return _arm(features)
    if architecture != "x86_64" or not {"avx2", "fma", "f16c"} <= features:
        return PORTABLE
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= features:
        if features >= _AMX_FEATURES:
            return AMX
        return _extended(
            AVX512,
            features,
            {"avx512_vnni": ("vnni", "-mavx512vnni"), "avx512_bf16": ("bf16", "-mavx512bf16")},
        )
    return _extended(AVX2, features, {"avx_vnni": ("vnni", "-mavxvnni")})


def _may_use_tiles() -> bool:
    """Whether the system lets this process use AMX's registers: it has to ask, once."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def cpu_features() -> frozenset[str]:
    """Features as Linux lists them; empty elsewhere, where only the portable build is sure."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _extended(
    base: InstructionSet, features: frozenset[str], extensions: dict[str, tuple[str, str]]
) -> InstructionSet:
    """``base`` with the extensions that are there: feature -> (name, flag)."""
    found = [extensions[feature] for feature in extensions if feature in features]
    return InstructionSet(
        "+".join([base.name, *(name for name, _ in found)]),
        (*base.flags, *(flag for _, flag in found)),
    )


def _arm(features: frozenset[str]) -> InstructionSet:
    known = {"asimddp": ("dotprod", "+dotprod"), "bf16": ("bf16", "+bf16")}
    found = [known[feature] for feature in known if feature in features]
    if not found:
        return InstructionSet("neon", ())
    march = "-march=armv8.2-a" + "".join(flag for _, flag in found)
    return InstructionSet("+".join(["neon", *(name for name, _ in found)]), (march,))
