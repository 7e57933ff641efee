"""The instances the router knows, each with an open stream.

    1  register    checked against the others; a stream to it is opened in the background
    2  ready       the stream is open: requests may be placed on it
    3  heartbeats  bring its load; silence for 3 s means it is gone
    4  gone        said goodbye, broke its stream, fell silent or was replaced by a restart at
                   its address: its requests end at once, it leaves the table

Knows nothing of requests. Owned by ``app``; ``cluster_service`` feeds it, ``serving`` uses it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from engine.kv.journal import CacheNews
from services.router.cache_index import CacheIndex
from services.router.link import Link
from services.router.membership import Instance, Load, Membership, Snapshot
from services.router.streams import Dial
from services.runtime.errors import ServiceError, Unavailable
from services.runtime.journal import fields
from services.runtime.lifecycle import Component

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.25


class Fleet(Component):
    """Membership with streams."""

    def __init__(
        self,
        model: str,
        dial: Dial,
        on_change: Callable[[Snapshot], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = Membership(model)
        self._dial = dial
        self._on_change = on_change
        self._clock = clock
        self._cache = CacheIndex()
        self._links: dict[str, Link] = {}
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._stopped = False
        self._news = asyncio.Event()

    async def start(self) -> None:
        self._sweeper = self._spawn(self._sweep())

    async def watch(self) -> None:
        assert self._sweeper is not None
        await asyncio.shield(self._sweeper)

    async def stop(self) -> None:
        self._stopped = True
        links, self._links = list(self._links.values()), {}
        stopping = Unavailable("the router is stopping")
        await asyncio.gather(*(link.close(stopping) for link in links))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def register(self, instance: Instance, load: Load) -> None:
        """Let an instance in.

        Raises:
            FailedPrecondition: it serves something else than the others.
            Unavailable: the router is stopping.
        """
        if self._stopped:
            raise Unavailable("the router is stopping")
        known = self._membership.get(instance.instance_id) == instance
        replaced = self._membership.register(instance, load, self._clock())
        for other_id in replaced:
            self._cache.forget(other_id)
            self._drop(other_id, Unavailable("the instance was restarted"))
        if not known:
            self._say("registered", instance)
            instance_id = instance.instance_id
            task = self._connecting[instance_id] = self._spawn(self._connect(instance))
            task.add_done_callback(lambda _: self._connecting.pop(instance_id, None))
        self._changed()

    async def connected(self, instance_id: str, timeout_s: float) -> None:
        """Wait, at most so long, until the stream to a registered instance is open or given up."""
        if (task := self._connecting.get(instance_id)) is not None:
            await asyncio.wait({task}, timeout=timeout_s)

    def heartbeat(self, instance_id: str, load: Load, news: CacheNews | None = None) -> bool:
        """Take a sign of life; False: unknown, it should register again."""
        known = self._membership.heartbeat(instance_id, load, self._clock())
        if known:
            if news is not None:
                self._cache.apply(instance_id, news)
            self._changed()
        return known

    @property
    def cache(self) -> CacheIndex:
        """Who has which beginnings of prompts."""
        return self._cache

    def deregister(self, instance_id: str) -> None:
        """An instance says goodbye. Unknown ids are ignored: it may have been lost before."""
        self._leave(instance_id, "said goodbye")

    async def changed(self) -> None:
        """Until somebody came, went or said something new."""
        await self._news.wait()

    def snapshot(self) -> Snapshot:
        """The cluster now."""
        pending = {instance_id: link.pending for instance_id, link in self._links.items()}
        return self._membership.snapshot(pending)

    def link(self, instance_id: str) -> Link:
        """The stream of an instance that a snapshot of this moment calls ready."""
        return self._links[instance_id]

    async def _connect(self, instance: Instance) -> None:
        link = Link(instance, self._dial, self._broken)
        try:
            await link.open()
        except Unavailable as error:
            log.warning("cannot reach instance %s: %s", instance.instance_id, error)
            if self._membership.get(instance.instance_id) == instance:
                self._leave(instance.instance_id, "cannot be reached")
            return
        wanted = self._membership.get(instance.instance_id) == instance
        if self._stopped or not wanted or instance.instance_id in self._links:
            await link.close(Unavailable("the instance left while the router connected"))
            return
        self._links[instance.instance_id] = link
        self._membership.connect(instance.instance_id)
        self._say("ready", instance)
        self._changed()

    async def _sweep(self) -> None:
        """Find the silent ones. When this task itself ran late, nobody could be heard: forgive."""
        due_s = self._clock()
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            due_s += SWEEP_INTERVAL_S
            late_s = self._clock() - due_s
            if late_s > SWEEP_INTERVAL_S:
                self._membership.forgive(late_s)
                due_s += late_s
            for instance_id in self._membership.silent(self._clock()):
                self._leave(instance_id, "is silent", died=True)

    def _broken(self, link: Link, error: ServiceError) -> None:
        if self._links.get(link.instance.instance_id) is link:
            self._leave(link.instance.instance_id, "broke its stream", died=True)

    def _leave(self, instance_id: str, how: str, *, died: bool = False) -> None:
        instance = self._membership.remove(instance_id)
        if instance is None:
            return
        self._cache.forget(instance_id)
        self._say(how, instance)
        role = instance.role.value
        gone = Unavailable(f"the {role} instance at {instance.address} {how}")
        self._drop(instance_id, gone, died=died)
        self._changed()

    def _drop(self, instance_id: str, error: ServiceError, *, died: bool = False) -> None:
        link = self._links.pop(instance_id, None)
        if link is not None:
            self._spawn(link.close(error, died=died))

    def _changed(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._on_change(self.snapshot())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("the fleet lost a task", exc_info=error)

    def _say(self, what: str, instance: Instance) -> None:
        said = fields(
            instance=instance.instance_id, role=instance.role.value, address=instance.address
        )
        log.info("instance %s %s", what, said)
