"""The numeric recipe: what weights are kept as, what is computed in, what KV is stored as.

One per cluster, and part of the model digest: instances that differ in it would hand over KV that
means something else. Settles what ``auto`` means for a model on a machine. Pure functions over
what the caller found out. Called by ``engine.models.choose``.
"""

from dataclasses import dataclass

from engine.errors import ModelError

WEIGHTS = ("auto", "float32", "bf16", "int8", "file")
DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = ("auto", "int8")
NATIVE_ONLY = ("int8", "file")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What every instance of a cluster agrees on."""

    weights: str
    """float32; bf16; int8: groups of 64, activations likewise; file: the GGUF's own blocks,
    multiplied by int8 activations in groups of 32."""
    dtype: str
    """Of activations where weights are not integers: float32 or bfloat16."""
    kv_dtype: str
    """The same, or int8 with a scale for every token's key, and value, of every head."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides ``auto``."""

    has_native: bool
    """The native kernels run this model here."""
    has_bfloat16: bool
    """The processor multiplies bfloat16."""
    has_blocks: bool
    """The file holds blocks that the native kernels multiply as they are."""


def resolve_recipe(weights: str, dtype: str, kv_dtype: str, machine: Machine) -> Recipe:
    """The recipe that is asked for; ``auto`` where nothing is.

    auto is the fastest one that stays within 1 % of the file's own perplexity (measured in
    ``docs/recipes.md``): the file's own blocks; else bfloat16 where it is multiplied; else
    float32. Asking for float32 in one of the two means both. KV is kept as it is computed, unless
    int8 is asked for.

    Raises:
        ModelError: unknown names, or a pair that does not go together here.
    """
    if weights not in WEIGHTS:
        raise ModelError(f"weights {weights}: unknown; use one of {', '.join(WEIGHTS)}")
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype}: unknown; use one of {', '.join(DTYPES)}")
    if kv_dtype not in KV_DTYPES:
        raise ModelError(f"kv-dtype {kv_dtype}: unknown; use one of {', '.join(KV_DTYPES)}")
    if weights == "auto":
        weights = _auto_weights(dtype, machine)
    if weights in NATIVE_ONLY and not machine.has_native:
        raise ModelError(f"weights {weights}: needs the native kernels, which do not run here")
    if weights == "file" and not machine.has_blocks:
        raise ModelError("weights file: the model has no blocks to multiply as they are; use auto")
    fitting = "float32" if weights == "float32" else "bfloat16"
    if dtype not in ("auto", fitting):
        raise ModelError(f"weights {weights} go with dtype {fitting}, not {dtype}; use auto")
    return Recipe(weights, fitting, fitting if kv_dtype == "auto" else kv_dtype)


def _auto_weights(dtype: str, machine: Machine) -> str:
    if dtype == "float32":
        return "float32"
    if machine.has_native and machine.has_blocks:
        return "file"
    return "bf16" if dtype == "bfloat16" or machine.has_bfloat16 else "float32"
