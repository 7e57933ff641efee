"""What every test shares: one compute thread a process, and hypothesis without deadlines."""

import os

# Before torch is imported: two processes of two OpenMP threads each collapse on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

# A shared machine is slow at random moments; the timeout of each test is the limit that counts.
settings.register_profile("ci", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")
