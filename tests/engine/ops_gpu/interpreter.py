"""What the tests do to triton's interpreter: mend what it gets wrong, count the bytes it moves."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def mend_bfloat16() -> None:
    """Make bfloat16 what it is on a GPU.

    The interpreter multiplies raw bits in ``tl.dot``: widen them, products are exact in float32. It
    cuts a float32 where it should round to nearest even.
    """
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self, src, dst_type):
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        return TensorHandle(np.where(np.isnan(src.data), 0x7FC0, rounded).astype(np.uint16),
                            dst_type.scalar)  # fmt: skip

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl


def mend_loop_bounds() -> None:
    """Let a one-element array bound a loop: triton 3.6 asks numpy 2.4 for what it refuses."""
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


@dataclass
class Moved:
    """Bytes of the lanes that were not masked off."""

    loaded: int = 0
    stored: int = 0


@contextmanager
def counted() -> Iterator[Moved]:
    """Count what kernels load and store meanwhile: every element as often as it is asked for."""
    moved = Moved()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counting_load(self, ptrs, mask, *rest):
        moved.loaded += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return load(self, ptrs, mask, *rest)

    def counting_store(self, ptrs, value, mask, *rest):
        moved.stored += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(self, ptrs, value, mask, *rest)

    InterpreterBuilder.create_masked_load = counting_load
    InterpreterBuilder.create_masked_store = counting_store
    try:
        yield moved
    finally:
        InterpreterBuilder.create_masked_load = load
        InterpreterBuilder.create_masked_store = store
