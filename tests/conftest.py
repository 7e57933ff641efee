"""What every test shares: one compute thread a process, and hypothesis without deadlines."""

import os

# Before torch is imported: two processes of two OpenMP threads each collapse on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

# A shared machine is slow at random moments; the timeout of each test is the limit that counts.
# CI draws the same examples every time, so that a change is judged by itself; others explore.
settings.register_profile(
    "ours",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("ours")
