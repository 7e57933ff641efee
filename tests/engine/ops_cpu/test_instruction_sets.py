"""Which build a processor gets, from the features Linux lists."""

import pytest

from engine.ops.cpu.instruction_sets import cpu_features, of_machine, of_this_machine

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    "architecture,features,name",
    [
        ("x86_64", set(), "portable"),
        ("x86_64", {"avx2"}, "portable"),
        ("x86_64", AVX2, "avx2"),
        ("x86_64", AVX2 | {"avx_vnni"}, "avx2+vnni"),
        ("x86_64", AVX2 | {"avx512f"}, "avx2"),
        ("x86_64", AVX512, "avx512"),
        ("x86_64", AVX512 | {"avx512_vnni"}, "avx512+vnni"),
        ("x86_64", AVX512 | {"avx512_vnni", "avx512_bf16", "avx_vnni"}, "avx512+vnni+bf16"),
        ("aarch64", set(), "neon"),
        ("aarch64", {"asimd", "asimddp"}, "neon+dotprod"),
        ("arm64", {"asimddp", "bf16"}, "neon+dotprod+bf16"),
        (
            "x86_64",
            AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
            "avx512+vnni+bf16+amx",
        ),
        ("x86_64", AVX512 | {"amx_tile", "amx_bf16"}, "avx512"),
        ("riscv64", AVX512, "portable"),
    ],
)
def test_the_widest_that_all_features_allow(
    architecture: str, features: set[str], name: str
) -> None:
    assert of_machine(architecture, frozenset(features)).name == name


def test_this_machine_is_one_of_them() -> None:
    import platform

    features = cpu_features()
    possible = [
        of_machine(platform.machine(), some) for some in (features, features - {"amx_tile"})
    ]
    assert of_this_machine() in possible, "AMX needs the system's leave beside the processor's"
