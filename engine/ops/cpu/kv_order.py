"""KV regions between the kernels' order and plain rows.

``dot16`` (``native/kv_pages.h``) keeps pages of 16 tokens: per page and KV head, keys
``[head_dim / 2][16][2]``, then values ``[8][head_dim][2]``. ``rows`` is
``[2, block_size, num_kv_heads, head_dim]``. Both have the same size; values are only moved.

Knows layouts, not caches. For whoever must hand KV to a machine that keeps another order.
"""

import numpy as np
import numpy.typing as npt

from kvtransfer.layout import KvLayout

PAGE_TOKENS = 16
Elements = npt.NDArray[np.uint16]


def rows_from_dot16(regions: Elements, layout: KvLayout) -> Elements:
    """[blocks, elements of a region] in dot16 -> [blocks, 2, block_size, kv_heads, head_dim]."""
    heads, dim = layout.num_kv_heads, layout.head_dim
    pages = regions.reshape(len(regions), -1, heads, 2, PAGE_TOKENS * dim)
    rows = np.empty((len(regions), 2, layout.block_size, heads, dim), np.uint16)
    by_page = rows.reshape(len(regions), 2, -1, PAGE_TOKENS, heads, dim)
    # block, page, head, pair of dimensions, token, dimension -> block, page, token, head, dim
    keys = pages[:, :, :, 0].reshape(*pages.shape[:3], dim // 2, PAGE_TOKENS, 2)
    by_page[:, 0] = keys.transpose(0, 1, 4, 2, 3, 5).reshape(by_page[:, 0].shape)
    # block, page, head, pair of tokens, dimension, token
    values = pages[:, :, :, 1].reshape(*pages.shape[:3], PAGE_TOKENS // 2, dim, 2)
    by_page[:, 1] = values.transpose(0, 1, 3, 5, 2, 4).reshape(by_page[:, 1].shape)
    return rows


def dot16_from_rows(rows: Elements, layout: KvLayout) -> Elements:
    """The inverse of ``rows_from_dot16``."""
    blocks, heads, dim = len(rows), layout.num_kv_heads, layout.head_dim
    by_page = rows.reshape(blocks, 2, -1, PAGE_TOKENS, heads, dim)
    num_pages = by_page.shape[2]
    pages = np.empty((blocks, num_pages, heads, 2, PAGE_TOKENS * dim), np.uint16)
    keys = by_page[:, 0].reshape(blocks, num_pages, PAGE_TOKENS, heads, dim // 2, 2)
    pages[:, :, :, 0] = keys.transpose(0, 1, 3, 4, 2, 5).reshape(pages[:, :, :, 0].shape)
    values = by_page[:, 1].reshape(blocks, num_pages, PAGE_TOKENS // 2, 2, heads, dim)
    pages[:, :, :, 1] = values.transpose(0, 1, 4, 2, 5, 3).reshape(pages[:, :, :, 1].shape)
    return pages.reshape(blocks, -1)
