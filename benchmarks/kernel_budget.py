# mypy: disable-error-code="import-not-found, import-untyped"
"""What the GPU kernels cost on each chip, found by compiling them, without any GPU.

``python -m benchmarks.kernel_budget`` compiles every shipped configuration for every chip and
writes ``data/kernel_budget.json``: registers, spills, shared memory, occupancy. A case is compiled
again only when its kernel's code, its constants or triton have changed (``--all``: in any case).
``--check N`` compiles every N-th case and fails where the file says something else, or nothing.

Needs triton, and a process without its interpreter. Knows nothing of speed.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.ops.gpu.configs import CHIPS, Chip

BUDGET = Path(__file__).parent / "data" / "kernel_budget.json"


@dataclass(frozen=True, slots=True)
class Use:
    """What one compiled kernel takes."""

    num_warps: int
    """Waves of 64 on AMD, warps of 32 elsewhere."""
    registers: int
    """Of a thread; vector registers on AMD."""
    spill_bytes: int
    """Of a thread, in local memory; spilled registers on AMD times four."""
    shared_bytes: int
    """Of a program."""
    tensor_columns: int
    """Of tensor memory, which only sm_100 has; 512 in a processor."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a processor can hold at once."""

    registers: int
    """NVIDIA: of a processor. AMD: of a lane, in each of the four units."""
    register_step: int
    """Registers are given out in these steps: to a warp; on AMD to a lane."""
    warps: int
    """NVIDIA: of a processor. AMD: of each unit."""
    programs: int
    shared_bytes: int
    reserved_bytes: int
    """Shared memory that each program costs on top."""


# NVIDIA: CUDA programming guide, "Compute Capabilities". AMD: CDNA 3 ISA guide, 8 waves a unit.
LIMITS = {
    "sm_80": Limits(65536, 256, 64, 32, 167936, 1024),
    "sm_90": Limits(65536, 256, 64, 32, 233472, 1024),
    "sm_100": Limits(65536, 256, 64, 32, 233472, 1024),
    "gfx942": Limits(512, 8, 8, 32, 65536, 0),
}
TENSOR_COLUMNS = 512
MOST_REGISTERS = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 512}


def occupancy(chip: Chip, use: Use) -> float:
    """Share of the warps a processor can hold that are there when it is full of this kernel."""
    limits = LIMITS[chip.name]
    shared = use.shared_bytes + limits.reserved_bytes
    by_shared = limits.shared_bytes // shared if shared else limits.programs
    if chip.is_amd:
        per_lane = -(-max(1, use.registers) // limits.register_step) * limits.register_step
        waves = min(limits.warps, limits.registers // per_lane)
        return min(by_shared * use.num_warps, waves * 4) / (limits.warps * 4)
    step = limits.register_step
    per_warp = -(-use.registers * 32 // step) * step
    by_registers = limits.registers // per_warp // use.num_warps
    programs = min(by_shared, by_registers, limits.programs, limits.warps // use.num_warps)
    if use.tensor_columns:
        programs = min(programs, TENSOR_COLUMNS // use.tensor_columns)
    return programs * use.num_warps / limits.warps


def compile_case(case: Any, chip: Chip) -> Use:
    """Compile for a chip that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = (
        GPUTarget("hip", chip.name, 64)
        if chip.is_amd
        else GPUTarget("cuda", int(chip.name.removeprefix("sm_")), 32)
    )
    source = ASTSource(
        fn=case.kernel, signature=case.signature, constexprs=case.constants, attrs=case.attributes
    )
    options = {"num_warps": case.config.num_warps, "num_stages": case.config.num_stages}
    compiled = triton.compile(source, target=target, options=options)
    metadata = compiled.metadata
    if chip.is_amd:
        text = compiled.asm["amdgcn"]

        def of(name: str) -> int:
            found = re.search(rf"\.{name}:\s*(\d+)", text)
            assert found is not None, name
            return int(found[1])

        spills = 4 * (of("vgpr_spill_count") + of("sgpr_spill_count"))
        return Use(case.config.num_warps, of("vgpr_count"), spills, metadata.shared, 0)
    registers, stack = _resources(triton.knobs.nvidia.cuobjdump.path, compiled.asm["cubin"])
    columns = getattr(metadata, "tmem_size", None) or 0
    return Use(metadata.num_warps, registers, stack, metadata.shared, columns)


def _resources(cuobjdump: str, cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack: these kernels have one only for spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [cuobjdump, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    numbers = {key: int(number) for key, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def fingerprint(case: Any) -> str:
    """Changes with the kernel's code, with what it calls, and with how it is compiled."""
    said = json.dumps(
        [case.kernel.cache_key, case.signature, case.constants, asdict(case.config)],
        sort_keys=True,
    )
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def objections(chip: Chip, use: Use) -> list[str]:
    """In what a kernel does not fit a chip."""
    found = []
    if use.spill_bytes:
        found.append(f"spills {use.spill_bytes} bytes a thread")
    if use.registers > MOST_REGISTERS[chip.name]:
        found.append(f"{use.registers} registers")
    if use.shared_bytes > chip.shared_bytes:
        found.append(f"{use.shared_bytes} bytes of shared memory of {chip.shared_bytes}")
    if use.tensor_columns > TENSOR_COLUMNS:
        found.append(f"{use.tensor_columns} columns of tensor memory")
    if not occupancy(chip, use):
        found.append("not one program fits a processor")
    return found


def entry(case: Any, chip: Chip) -> dict[str, Any]:
    """One row of the file."""
    use = compile_case(case, chip)
    return {
        **asdict(use),
        "occupancy": round(occupancy(chip, use), 3),
        "fingerprint": fingerprint(case),
    }


def read() -> dict[str, Any]:
    """The file: which triton made it, and chip -> case -> row."""
    if not BUDGET.exists():
        return {"triton": "", "uses": {chip: {} for chip in CHIPS}}
    budget: dict[str, Any] = json.loads(BUDGET.read_text("utf-8"))
    return budget


def misfits(chip: Chip, name: str, row: dict[str, Any]) -> list[str]:
    """``objections`` to a row, each saying which."""
    use = Use(**{field: row[field] for field in Use.__slots__})
    return [f"{chip.name} {name}: {said}" for said in objections(chip, use)]


def check(every: int) -> list[str]:
    """What is wrong with the file: what it lacks, what is stale, what a compiler says otherwise.

    Of another triton than the file's, only that everything compiled fits its chip.
    """
    import triton

    from engine.ops.gpu.compile_cases import compile_cases

    budget, number, wrong = read(), 0, []
    is_same = budget["triton"] == triton.__version__
    for chip in CHIPS.values():
        rows = dict(budget["uses"][chip.name])
        for case in compile_cases(chip):
            number += 1
            row = rows.pop(case.name, None)
            if row is None or (is_same and row["fingerprint"] != fingerprint(case)):
                wrong.append(
                    f"{chip.name} {case.name}: stale, run python -m benchmarks.kernel_budget"
                )
                continue
            wrong += misfits(chip, case.name, row)
            if number % every == 0:
                made = entry(case, chip)
                wrong += misfits(chip, case.name, made)
                if is_same and made != row:
                    wrong.append(f"{chip.name} {case.name}: {made}, the file says {row}")
        wrong += [f"{chip.name} {name}: not shipped any more" for name in rows]
    return wrong


def renew(everything: bool) -> list[str]:
    """Write the file, and say what does not fit its chip."""
    import triton

    from engine.ops.gpu.compile_cases import compile_cases

    old, wrong = read(), []
    is_same = old["triton"] == triton.__version__ and not everything
    uses: dict[str, dict[str, Any]] = {}
    for chip in CHIPS.values():
        uses[chip.name] = {}
        for case in compile_cases(chip):
            row = old["uses"][chip.name].get(case.name)
            if row is None or not is_same or row["fingerprint"] != fingerprint(case):
                row = entry(case, chip)
                print(chip.name, case.name, *row.values(), flush=True)
            uses[chip.name][case.name] = row
            wrong += misfits(chip, case.name, row)
    BUDGET.write_text(json.dumps({"triton": triton.__version__, "uses": uses}, indent=1) + "\n")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="compile also what has not changed")
    parser.add_argument("--check", type=int, metavar="N", help="write nothing; see above")
    args = parser.parse_args()
    wrong = check(args.check) if args.check else renew(args.all)
    print(*wrong, f"{len(wrong)} objections", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
