"""The shipped configurations of the kernels: a few, each with a name, and who gets which.

Tiles were chosen from what the compiler makes of them (``docs/gpu_kernels.md``): no spills on any
chip, shared memory within the smallest chip's, occupancy that hides memory. Knows nothing of
triton: the budget's script and the documents read it too.
"""

from dataclasses import dataclass

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one kernel is cut."""

    name: str
    block_m: int
    """Rows of a tile: query rows of attention (tokens times heads of a group), heads of rotary and
    of the wire form; 1 elsewhere."""
    block_n: int
    """Columns of a tile: positions of attention, elements elsewhere; 0: what the shape asks for."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Chip:
    """What a kernel may use, and what decides its configuration."""

    name: str
    family: str
    """ampere: tensor cores fed by warps; hopper: by groups of four warps, also Blackwell; amd."""
    num_processors: int
    """Streaming multiprocessors or compute units of the common part."""
    shared_bytes: int
    """That one program may have."""

    @property
    def is_amd(self) -> bool:
        return self.family == "amd"


CHIPS = {
    "sm_80": Chip("sm_80", "ampere", 108, 166912),
    "sm_90": Chip("sm_90", "hopper", 132, 232448),
    "sm_100": Chip("sm_100", "hopper", 148, 232448),
    "gfx942": Chip("gfx942", "amd", 304, 65536),
}

# (family, kind, padded head_dim) -> tile. Kinds: half: 16 bit queries and KV; quantised: 16 bit
# queries and 8 bit KV, which takes registers to convert; float: all of 32 bits, which on NVIDIA is
# multiplied without tensor cores, so that it is float32 indeed.
_PREFILL = {
    ("ampere", "half", 64): TileConfig("ampere_half_64", 128, 64, 8, 3),
    ("ampere", "half", 128): TileConfig("ampere_half_128", 64, 64, 8, 3),
    ("ampere", "half", 256): TileConfig("ampere_half_256", 64, 32, 8, 3),
    ("ampere", "quantised", 64): TileConfig("ampere_quantised_64", 128, 32, 8, 3),
    ("ampere", "quantised", 128): TileConfig("ampere_quantised_128", 128, 32, 8, 3),
    ("ampere", "quantised", 256): TileConfig("ampere_quantised_256", 64, 32, 8, 3),
    ("ampere", "float", 64): TileConfig("ampere_float_64", 64, 16, 8, 2),
    ("ampere", "float", 128): TileConfig("ampere_float_128", 32, 16, 8, 2),
    ("ampere", "float", 256): TileConfig("ampere_float_256", 16, 32, 8, 2),
    ("hopper", "half", 64): TileConfig("hopper_half_64", 128, 64, 8, 3),
    ("hopper", "half", 128): TileConfig("hopper_half_128", 128, 64, 8, 3),
    ("hopper", "half", 256): TileConfig("hopper_half_256", 128, 32, 8, 3),
    ("hopper", "quantised", 64): TileConfig("hopper_quantised_64", 128, 64, 8, 3),
    ("hopper", "quantised", 128): TileConfig("hopper_quantised_128", 128, 64, 8, 3),
    ("hopper", "quantised", 256): TileConfig("hopper_quantised_256", 64, 32, 8, 2),
    ("hopper", "float", 64): TileConfig("hopper_float_64", 64, 16, 8, 2),
    ("hopper", "float", 128): TileConfig("hopper_float_128", 32, 16, 8, 2),
    ("hopper", "float", 256): TileConfig("hopper_float_256", 16, 32, 8, 2),
    ("amd", "half", 64): TileConfig("amd_half_64", 128, 32, 4, 1),
    ("amd", "half", 128): TileConfig("amd_half_128", 128, 32, 8, 1),
    ("amd", "half", 256): TileConfig("amd_half_256", 64, 16, 4, 1),
    ("amd", "quantised", 64): TileConfig("amd_quantised_64", 128, 32, 4, 1),
    ("amd", "quantised", 128): TileConfig("amd_quantised_128", 128, 32, 8, 1),
    ("amd", "quantised", 256): TileConfig("amd_quantised_256", 64, 16, 4, 1),
    ("amd", "float", 64): TileConfig("amd_float_64", 64, 32, 8, 1),
    ("amd", "float", 128): TileConfig("amd_float_128", 64, 16, 8, 1),
    ("amd", "float", 256): TileConfig("amd_float_256", 32, 16, 4, 1),
}
# (AMD?, float32?, padded head_dim) -> tile. 16 rows are the least a tensor core takes.
_DECODE = {
    (False, False, 64): TileConfig("half_64", 16, 128, 4, 3),
    (False, False, 128): TileConfig("half_128", 16, 64, 4, 3),
    (False, False, 256): TileConfig("half_256", 16, 32, 4, 3),
    (False, True, 64): TileConfig("float_64", 16, 32, 4, 2),
    (False, True, 128): TileConfig("float_128", 16, 16, 4, 2),
    (False, True, 256): TileConfig("float_256", 16, 16, 4, 2),
    (True, False, 64): TileConfig("amd_half_64", 16, 64, 4, 2),
    (True, False, 128): TileConfig("amd_half_128", 16, 64, 4, 2),
    (True, False, 256): TileConfig("amd_half_256", 16, 32, 4, 2),
    (True, True, 64): TileConfig("amd_float_64", 16, 16, 4, 2),
    (True, True, 128): TileConfig("amd_float_128", 16, 16, 4, 2),
    (True, True, 256): TileConfig("amd_float_256", 16, 16, 4, 1),
}

REDUCE = TileConfig("reduce", 1, 0, 4, 1)
ROTARY = TileConfig("rotary", 4, 0, 4, 1)
WIRE_FORM = TileConfig("wire_form", 4, 0, 4, 1)
ACTIVATION = TileConfig("activation", 1, 1024, 4, 1)
COPY = TileConfig("copy", 1, 2048, 4, 1)
# A row of norm is one program: enough warps that a thread holds at most 32 elements of it.
NORM_SMALL = TileConfig("norm_small", 1, 0, 4, 1)
NORM_LARGE = TileConfig("norm_large", 1, 0, 16, 1)
MOST_NORM_SMALL = 2048
MOST_NORM = 16384

# A split reads at least this many positions: less is not worth a second kernel's reading of it.
LEAST_SPLIT = 256
MOST_SPLITS = 64


def power_of_two(n: int) -> int:
    """The smallest that is not below n (at least 1)."""
    return 1 << (n - 1).bit_length()


def head_pad(head_dim: int) -> int:
    """The width of a tile that holds a head."""
    return power_of_two(head_dim)


def prefill_config(head_dim: int, element_bytes: int, is_quantised: bool, chip: Chip) -> TileConfig:
    """For queries of ``element_bytes`` an element over KV of that type, or of 8 bits.

    Float32 queries over 8 bit KV go as the float kind: their tiles are small enough.
    """
    kind = "float" if element_bytes == 4 else "quantised" if is_quantised else "half"
    return _PREFILL[chip.family, kind, max(64, head_pad(head_dim))]


def decode_config(head_dim: int, element_bytes: int, chip: Chip) -> TileConfig:
    """For queries of ``element_bytes`` an element; ``block_m`` grows with the group."""
    return _DECODE[chip.is_amd, element_bytes == 4, max(64, head_pad(head_dim))]


def norm_config(num_columns: int) -> TileConfig:
    """For rows of ``num_columns``."""
    return NORM_SMALL if num_columns <= MOST_NORM_SMALL else NORM_LARGE


def choose_num_splits(num_sequences: int, num_kv_heads: int, chip: Chip) -> int:
    """Into how many parts a sequence's context is cut, a power of two.

    Twice as many programs as processors, so that one waits for memory while another computes. Not
    by length: how long contexts are is known on the device only, where short ones use fewer splits,
    and one CUDA graph serves all lengths.
    """
    wanted = 2 * chip.num_processors
    programs = max(1, num_sequences * num_kv_heads)
    return min(MOST_SPLITS, power_of_two(max(1, -(-wanted // programs))))
