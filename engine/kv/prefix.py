"""Block hashes and the prefix index: which block holds the KV of which beginning.

Knows nothing of free lists or sequences. Called by ``manager``; the hash functions also by
whoever compares prompts between instances, so their bytes are a published format:

    root  = sha256("kvrelay.block.v1" | field(model_digest) | field(adapter) | field(salt))
    field = length of the UTF-8 bytes as uint32, then the bytes
    h[0]  = sha256(root   | 16 token ids as uint32)
    h[i]  = sha256(h[i-1] | 16 token ids as uint32)

All integers are little-endian. A chain has one link per full run of 16 tokens, whatever the
block size; a block's hash is the link at its end. So instances with different block sizes
agree on every end that both have.
"""

import struct
from collections.abc import Iterable, Sequence
from hashlib import sha256

from engine.errors import IntegrityError, InvalidConfig
from engine.kv.journal import CacheJournal

RUN_TOKENS = 16
_TAG = b"kvrelay.block.v1"
_RUN_BYTES = 4 * RUN_TOKENS


def root_hash(model_digest: str, adapter: str = "", salt: str = "") -> bytes:
    """Where the chains of one model, adapter and salt begin."""
    fields = [text.encode() for text in (model_digest, adapter, salt)]
    return sha256(_TAG + b"".join(struct.pack("<I", len(raw)) + raw for raw in fields)).digest()


def extend_chain(parent: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """The links that follow ``parent``, one per full run of ``token_ids``."""
    num_runs = len(token_ids) // RUN_TOKENS
    packed = struct.pack(f"<{num_runs * RUN_TOKENS}I", *token_ids[: num_runs * RUN_TOKENS])
    links = []
    for at in range(0, len(packed), _RUN_BYTES):
        parent = sha256(parent + packed[at : at + _RUN_BYTES]).digest()
        links.append(parent)
    return links


def block_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of ``token_ids``, which begin a block after ``parent``."""
    num_tokens = len(token_ids) // block_size * block_size
    runs_per_block = block_size // RUN_TOKENS
    return extend_chain(parent, token_ids[:num_tokens])[runs_per_block - 1 :: runs_per_block]


def check_block_size(block_size: int) -> None:
    """
    Raises:
        InvalidConfig: blocks of this size do not end where hashes do.
    """
    if block_size <= 0 or block_size % RUN_TOKENS:
        raise InvalidConfig(f"block_size {block_size}: must be a multiple of {RUN_TOKENS}")


class PrefixIndex:
    """Block hash <-> block id, one to one."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self.journal = CacheJournal(lambda: self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hashes

    def blocks(self) -> dict[bytes, int]:
        """Block hash -> block id."""
        return dict(self._blocks)

    def longest_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest beginning of ``hashes`` that is indexed without a gap."""
        found = []
        for block_hash in hashes:
            block_id = self._blocks.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def add(self, block_hash: bytes, block_id: int) -> bool:
        """False when another block has this hash already: the first one stays."""
        if block_hash in self._blocks:
            return False
        self._blocks[block_hash] = block_id
        self._hashes[block_id] = block_hash
        self.journal.stored(block_hash)
        return True

    def forget(self, block_id: int) -> None:
        """The block is evicted. Nothing happens when it is not indexed."""
        block_hash = self._hashes.pop(block_id, None)
        if block_hash is not None:
            del self._blocks[block_hash]
            self.journal.removed(block_hash)

    def check_integrity(self) -> None:
        """
        Raises:
            IntegrityError: the two directions disagree.
        """
        if {block_id: block_hash for block_hash, block_id in self._blocks.items()} != self._hashes:
            raise IntegrityError("prefix index: hash -> block and block -> hash disagree")
