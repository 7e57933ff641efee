"""Block hashes are a published format: these vectors were computed from its description."""

import subprocess
import sys

import pytest

from engine.errors import InvalidConfig
from engine.kv.manager import KvManager
from engine.kv.prefix import PrefixIndex, block_hashes, extend_chain, root_hash

ROOTS = {
    ("", "", ""): "acaa782742fda32ccedddbdea58eb0fef39580b74bebb8cf1b43d04f77d17cf8",
    ("m", "", ""): "c4486546a1808f547b95aa606873b02dedde53dcce25da8089050677cc5a971e",
    ("model", "lora-a", "tenant \u00fc"): (
        "83ee89e8420bb1938169fb2bf009c23fbd9ccfc209924c461cfa99d5d56637a2"
    ),
}
COUNTING = (
    "289c5fb0549b4290ffc499e05095e3a0280b2416392b0584bc3f6abb5410d353",
    "4ca921d0259bfebfb1b0a3b3404096f41973a36ab8da69488613f3915e00155f",
)
EXTREMES = (
    "b13089019f16ff987d945420cee8ed0cee4b9cbef32bddef46444ace931ff05e",
    "15ff0982ded5d332748373b6a488b3e7bd2cc4baadcd022f1093f7022f53e9bc",
)


@pytest.mark.parametrize(("fields", "expected"), ROOTS.items())
def test_root_vectors(fields: tuple[str, str, str], expected: str) -> None:
    assert root_hash(*fields).hex() == expected


def test_chain_vectors() -> None:
    links = extend_chain(root_hash("m"), range(40))
    assert tuple(link.hex() for link in links) == COUNTING
    root = root_hash("model", "lora-a", "tenant \u00fc")
    links = extend_chain(root, [2**32 - 1] * 16 + [0] * 16)
    assert tuple(link.hex() for link in links) == EXTREMES


def test_a_block_of_any_size_is_named_by_the_link_at_its_end() -> None:
    tokens = list(range(200))
    links = extend_chain(root_hash("m"), tokens)
    assert block_hashes(root_hash("m"), tokens, 16) == links
    assert block_hashes(root_hash("m"), tokens, 32) == links[1::2]
    assert block_hashes(root_hash("m"), tokens, 48) == links[2::3]
    assert block_hashes(root_hash("m"), tokens, 256) == []


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 31, 32, 33])
def test_only_full_blocks_have_a_hash(num_tokens: int) -> None:
    tokens = list(range(num_tokens))
    assert len(block_hashes(root_hash("m"), tokens, 16)) == num_tokens // 16
    assert len(block_hashes(root_hash("m"), tokens, 32)) == num_tokens // 32


def test_the_chain_goes_on_where_it_stopped() -> None:
    tokens = list(range(96))
    head = block_hashes(root_hash("m"), tokens[:32], 32)
    assert head + block_hashes(head[-1], tokens[32:], 32) == block_hashes(
        root_hash("m"), tokens, 32
    )


def test_model_adapter_salt_and_every_token_count() -> None:
    tokens = list(range(32))
    variants = [
        extend_chain(root_hash("m"), tokens),
        extend_chain(root_hash("n"), tokens),
        extend_chain(root_hash("m", adapter="a"), tokens),
        extend_chain(root_hash("m", salt="a"), tokens),
        extend_chain(root_hash("ma"), tokens),
        extend_chain(root_hash("m"), [99, *tokens[1:]]),
    ]
    assert len({links[-1] for links in variants}) == len(variants)


def test_hashes_are_equal_in_every_process() -> None:
    code = (
        "from engine.kv.prefix import *; print(extend_chain(root_hash('m'), range(40))[-1].hex())"
    )
    for seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert answer.stdout.strip() == COUNTING[1]


@pytest.mark.parametrize("block_size", [0, -16, 8, 24])
def test_block_sizes_without_a_hash_at_their_end_are_refused(block_size: int) -> None:
    with pytest.raises(InvalidConfig, match="block_size"):
        KvManager(4, block_size, "m")


def test_the_index_finds_the_longest_beginning_without_a_gap() -> None:
    index = PrefixIndex()
    first, second, third = extend_chain(root_hash("m"), range(48))
    assert index.add(first, 7) and index.add(third, 9)
    assert index.longest_prefix([first, second, third]) == [7]
    assert index.add(second, 8)
    assert index.longest_prefix([first, second, third]) == [7, 8, 9]
    assert not index.add(second, 5)
    index.check_integrity()
    index.forget(7)
    index.forget(7)
    assert index.longest_prefix([first, second, third]) == []
    assert len(index) == 2
    index.check_integrity()
