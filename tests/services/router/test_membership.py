"""The instance table: entering, leaving, silence, and who does not belong."""

import dataclasses
from typing import Any

import pytest

from kvtransfer.layout import KvLayout
from services.router.membership import Instance, InstanceState, Load, Membership, Pending
from services.runtime.errors import FailedPrecondition
from services.runtime.settings import Role

LAYOUT = KvLayout("float32", 2, 1, 8, 16)


def instance(instance_id: str, role: Role = Role.DECODE, **change: Any) -> Instance:
    return Instance(
        **{
            "instance_id": instance_id,
            "role": role,
            "address": f"host-{instance_id}:1",
            "metrics_address": "",
            "model": "m",
            "model_digest": "d",
            "kv_layout": LAYOUT,
            "max_context": 512,
            "max_sequence_tokens": 4096,
            **change,
        }
    )


def states(membership: Membership) -> dict[str, InstanceState]:
    return {view.instance.instance_id: view.state for view in membership.snapshot({}).instances}


def test_an_instance_is_ready_once_its_stream_is_open() -> None:
    membership = Membership("m")
    assert not membership.snapshot({}).can_admit
    membership.register(instance("a"), Load(), 0.0)
    assert states(membership) == {"a": InstanceState.STARTING}
    assert not membership.snapshot({}).was_ready
    membership.connect("a")
    assert states(membership) == {"a": InstanceState.READY}
    assert membership.snapshot({}).can_admit
    membership.heartbeat("a", Load(draining=True), 1.0)
    assert states(membership) == {"a": InstanceState.DRAINING}
    assert not membership.snapshot({}).can_admit
    membership.remove("a")
    assert states(membership) == {}
    assert membership.snapshot({}).was_ready


def test_a_prefill_instance_alone_admits_nothing() -> None:
    membership = Membership("m")
    membership.register(instance("p", Role.PREFILL), Load(), 0.0)
    membership.connect("p")
    snapshot = membership.snapshot({})
    assert not snapshot.can_admit and not snapshot.was_ready
    assert snapshot.max_tokens is None


def test_silence_is_measured_from_the_last_sign_of_life() -> None:
    membership = Membership("m", lost_after_s=3.0)
    membership.register(instance("a"), Load(), 0.0)
    membership.register(instance("b"), Load(), 0.0)
    assert membership.heartbeat("b", Load(), 2.0)
    assert membership.silent(3.0) == ()
    assert membership.silent(3.1) == ("a",)
    membership.register(instance("a"), Load(), 3.1)
    assert membership.silent(5.0) == ()
    membership.forgive(1.0)
    assert membership.silent(6.0) == ()
    assert membership.silent(6.1) == ("b",)
    assert not membership.heartbeat("nobody", Load(), 9.0)


def test_registering_again_refreshes() -> None:
    membership = Membership("m")
    membership.register(instance("a"), Load(), 0.0)
    membership.connect("a")
    assert membership.register(instance("a"), Load(blocks_free=7), 1.0) == ()
    (view,) = membership.snapshot({"a": Pending(2, 30)}).instances
    assert (view.is_ready, view.load.blocks_free, view.pending) == (True, 7, Pending(2, 30))


def test_a_restart_at_an_address_replaces_who_was_there() -> None:
    membership = Membership("m")
    membership.register(instance("old", address="h:1"), Load(), 0.0)
    membership.connect("old")
    # It may even serve another model now: nobody else is here to differ from.
    new = instance("new", address="h:1", model_digest="d2")
    assert membership.register(new, Load(), 1.0) == ("old",)
    assert states(membership) == {"new": InstanceState.STARTING}


def test_the_same_id_with_another_description_starts_anew() -> None:
    membership = Membership("m")
    membership.register(instance("a"), Load(), 0.0)
    membership.connect("a")
    assert membership.register(instance("a", address="elsewhere:2"), Load(), 1.0) == ("a",)
    assert states(membership) == {"a": InstanceState.STARTING}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "n"}, "model: this cluster serves m, the instance serves n"),
        ({"model_digest": "e"}, "model_digest: d != e"),
        ({"kv_layout": dataclasses.replace(LAYOUT, head_dim=4)}, r"kv_layout.head_dim: 8 != 4"),
        ({"kv_layout": dataclasses.replace(LAYOUT, order="dot")}, r"kv_layout.order: rows != dot"),
    ],
)
def test_who_differs_is_refused_and_changes_nothing(change: dict[str, Any], reason: str) -> None:
    membership = Membership("m")
    membership.register(instance("a"), Load(), 0.0)
    before = membership.snapshot({})
    with pytest.raises(FailedPrecondition, match=reason):
        membership.register(instance("b", **change), Load(), 1.0)
    assert membership.snapshot({}) == before


def test_the_longest_sequence_is_what_any_writer_can_hold() -> None:
    membership = Membership("m")
    membership.register(instance("a", max_context=100), Load(), 0.0)
    membership.register(instance("b", max_context=900, max_sequence_tokens=300), Load(), 0.0)
    membership.register(instance("p", Role.PREFILL, max_context=9999), Load(), 0.0)
    assert membership.snapshot({}).max_tokens == 300
