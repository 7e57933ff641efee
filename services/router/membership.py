"""Who is in the cluster: a table of instances, and the rules for entering and leaving it.

An instance registers, is ``starting`` until the router's stream to it is open, then ``ready``, or
``draining`` when it says so. It leaves by saying goodbye, by a broken stream, or by silence.
Instances of one cluster serve the same model with the same KV layout, or are refused.

Pure: no clock (times are passed in), no network. Driven by ``fleet``, read by ``placement``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvtransfer.layout import KvLayout
from services.runtime.errors import FailedPrecondition
from services.runtime.settings import Role

LOST_AFTER_S = 3.0
"""An instance that was silent for so long is gone."""
HEARTBEAT_INTERVAL_S = 0.25
"""How often an instance tells its load: the status page is never older."""


class InstanceState(StrEnum):
    """What the router may do with an instance."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Instance:
    """What an instance said when it registered."""

    instance_id: str
    role: Role
    address: str
    metrics_address: str
    model: str
    model_digest: str
    kv_layout: KvLayout
    max_context: int
    max_sequence_tokens: int
    max_gap_s: float = 0.0
    """How much longer a step of its decodes takes that carries a chunk of a prompt, at most."""

    @property
    def max_tokens(self) -> int:
        """The longest sequence it can hold: its context, or all of its KV cache."""
        return min(self.max_context, self.max_sequence_tokens)

    @property
    def decodes(self) -> bool:
        """Whether it can write answers (it can then read prompts, too)."""
        return self.role is not Role.PREFILL


@dataclass(frozen=True, slots=True)
class Load:
    """What an instance said about itself in its last heartbeat."""

    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_held: int = 0
    blocks_quarantined: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    handoffs_active: int = 0
    draining: bool = False
    prompt_tokens_waiting: int = 0


@dataclass(frozen=True, slots=True)
class Pending:
    """What this router has placed on an instance and not yet seen the end of."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    """Of prompts, what is not computed yet."""
    num_prompts: int = 0
    """How many prompts that is."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance at one moment."""

    instance: Instance
    state: InstanceState
    load: Load
    pending: Pending
    heard_s: float = 0.0
    """When it was last heard of, by the fleet's clock."""

    @property
    def is_ready(self) -> bool:
        return self.state is InstanceState.READY

    @property
    def num_requests(self) -> int:
        """What this router has placed there, or all that it said to be there: other routers may
        place, too."""
        said = self.load.requests_running + self.load.requests_waiting
        return max(self.pending.num_requests, said)

    @property
    def num_prompt_tokens(self) -> int:
        """The same of prompt tokens that are to be computed."""
        return max(self.pending.num_prompt_tokens, self.load.prompt_tokens_waiting)

    @property
    def num_prompts(self) -> int:
        return max(self.pending.num_prompts, 1 if self.num_prompt_tokens else 0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster at one moment."""

    instances: tuple[InstanceView, ...] = ()
    was_ready: bool = False
    """Some time before, an instance could write answers."""

    @property
    def can_admit(self) -> bool:
        """Whether a request could be placed now."""
        return any(view.is_ready and view.instance.decodes for view in self.instances)

    def unheard(self, since_s: float) -> frozenset[str]:
        """Ids of those that are ready, as far as is known, but have said nothing since then."""
        return frozenset(
            view.instance.instance_id
            for view in self.instances
            if view.is_ready and view.heard_s < since_s
        )

    @property
    def max_tokens(self) -> int | None:
        """The longest sequence any instance can write; None: nobody is here to say."""
        return max(
            (view.instance.max_tokens for view in self.instances if view.instance.decodes),
            default=None,
        )

    @property
    def model_digest(self) -> str:
        """Of the model that is served; empty while nobody serves it."""
        return next((view.instance.model_digest for view in self.instances), "")


@dataclass(slots=True)
class _Member:
    instance: Instance
    load: Load
    seen_s: float
    is_connected: bool = False

    @property
    def state(self) -> InstanceState:
        if self.load.draining:
            return InstanceState.DRAINING
        return InstanceState.READY if self.is_connected else InstanceState.STARTING


class Membership:
    """The instance table of one router."""

    def __init__(self, model: str, lost_after_s: float = LOST_AFTER_S) -> None:
        self._model = model
        self._lost_after_s = lost_after_s
        self._members: dict[str, _Member] = {}
        self._was_ready = False

    def get(self, instance_id: str) -> Instance | None:
        """What an instance said when it registered; None: it is not in."""
        member = self._members.get(instance_id)
        return member.instance if member else None

    def register(self, instance: Instance, load: Load, now_s: float) -> tuple[str, ...]:
        """Let an instance in, or refresh it.

        Returns:
            Ids of instances that are gone because this one has their address, or their id.

        Raises:
            FailedPrecondition: it serves something else than the others; names the difference.
        """
        replaced = tuple(
            other_id
            for other_id, other in self._members.items()
            if other.instance != instance
            and (other.instance.address == instance.address or other_id == instance.instance_id)
        )
        self._check_fits(instance, replaced)
        for other_id in replaced:
            del self._members[other_id]
        known = self._members.get(instance.instance_id)
        if known is not None:
            known.load, known.seen_s = load, now_s
        else:
            self._members[instance.instance_id] = _Member(instance, load, now_s)
        return replaced

    def connect(self, instance_id: str) -> None:
        """The router's stream to it is open."""
        member = self._members[instance_id]
        member.is_connected = True
        self._was_ready = self._was_ready or member.instance.decodes

    def heartbeat(self, instance_id: str, load: Load, now_s: float) -> bool:
        """Take a sign of life; False: unknown, it should register again."""
        member = self._members.get(instance_id)
        if member is None:
            return False
        member.load, member.seen_s = load, now_s
        return True

    def remove(self, instance_id: str) -> Instance | None:
        """Take an instance out; None: it was not in."""
        member = self._members.pop(instance_id, None)
        return member.instance if member else None

    def silent(self, now_s: float) -> tuple[str, ...]:
        """Ids of the instances that were silent for too long."""
        return tuple(
            instance_id
            for instance_id, member in self._members.items()
            if now_s - member.seen_s > self._lost_after_s
        )

    def forgive(self, seconds: float) -> None:
        """The router itself was stuck for so long and could not have heard anybody."""
        for member in self._members.values():
            member.seen_s += seconds

    def snapshot(self, pending: Mapping[str, Pending]) -> Snapshot:
        """The table now; ``pending`` is by instance id."""
        views = tuple(
            InstanceView(m.instance, m.state, m.load, pending.get(instance_id, Pending()), m.seen_s)
            for instance_id, m in sorted(self._members.items())
        )
        return Snapshot(views, self._was_ready)

    def _check_fits(self, instance: Instance, leaving: tuple[str, ...]) -> None:
        if instance.model != self._model:
            raise FailedPrecondition(
                f"model: this cluster serves {self._model}, the instance serves {instance.model}"
            )
        for other_id, member in self._members.items():
            if other_id in leaving:
                continue
            if difference := _difference(member.instance, instance):
                raise FailedPrecondition(
                    f"{difference} (this cluster != the instance): "
                    "start it with the model and options of the others"
                )


def _difference(ours: Instance, theirs: Instance) -> str | None:
    if ours.model_digest != theirs.model_digest:
        return f"model_digest: {ours.model_digest[:16]} != {theirs.model_digest[:16]}"
    if difference := ours.kv_layout.difference(theirs.kv_layout):
        return f"kv_layout.{difference}"
    return None
