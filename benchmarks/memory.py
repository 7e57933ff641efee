"""The memory of every process of a cluster over time, for ``benchmarks.soak``.

A process counts what is its own: resident memory without what it shares with files and others'
mappings. The first quarter of a run is warm-up: caches fill. Slopes are of least squares.
"""

import asyncio
import contextlib
import statistics
import time

import psutil

MIB = 2**20
SAMPLE_S = 2.0
WARM_UP_SHARE = 0.25
GROWN_MIB, GROWN_SHARE = 8.0, 0.05
"""By the slope, over the measured part: more of both is growth."""


def workers(pid: int) -> dict[int, str]:
    """Process id -> role, of the instances below a ``kvrelay serve``."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = " ".join(child.cmdline()).split()
            if child.status() != psutil.STATUS_ZOMBIE and "worker" in title:
                found[child.pid] = next((r for r in ("prefill", "decode") if r in title), "worker")
    return found


class Memory:
    """Samples of a process and all below it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began_s = time.monotonic()
        self._samples: dict[int, list[tuple[float, float]]] = {}
        """Process id -> (seconds since the begin, MiB)."""
        self._names: dict[int, str] = {}

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            self._sample()
            await asyncio.sleep(SAMPLE_S)

    def table(self) -> str:
        """A line for each process that was there for the whole measured part."""
        lines = ["| process | MiB, mean | slope, MiB/hour |", "| --- | --- | --- |"]
        for pid, samples in self._measured().items():
            mean = statistics.mean(mib for _, mib in samples)
            slope = _slope(samples) * 3600
            lines.append(f"| {self._names[pid]} {pid} | {mean:.1f} | {slope:+.1f} |")
        return "\n".join(lines)

    def growing(self) -> list[str]:
        """A line for each of them that grows."""
        lines = []
        for pid, samples in self._measured().items():
            grown = _slope(samples) * (samples[-1][0] - samples[0][0])
            mean = statistics.mean(mib for _, mib in samples)
            if grown > GROWN_MIB and grown > GROWN_SHARE * mean:
                lines.append(f"{self._names[pid]} {pid} grew by {grown:.1f} MiB")
        return lines

    def _sample(self) -> None:
        root = psutil.Process(self._pid)
        roles = workers(self._pid)
        now_s = time.monotonic() - self._began_s
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                used = process.memory_info()
                own = (used.rss - used.shared) / MIB
                self._samples.setdefault(process.pid, []).append((now_s, own))
                default = "serve" if process.pid == self._pid else process.name()
                self._names.setdefault(process.pid, roles.get(process.pid, default))

    def _measured(self) -> dict[int, list[tuple[float, float]]]:
        ended_s = max(samples[-1][0] for samples in self._samples.values())
        from_s = ended_s * WARM_UP_SHARE
        whole = {
            pid: [each for each in samples if each[0] >= from_s]
            for pid, samples in self._samples.items()
            if samples[0][0] <= from_s and samples[-1][0] >= ended_s - 2 * SAMPLE_S
        }
        return {pid: samples for pid, samples in whole.items() if len(samples) > 2}


def _slope(samples: list[tuple[float, float]]) -> float:
    """MiB a second."""
    times, values = zip(*samples, strict=True)
    return statistics.linear_regression(times, values).slope
