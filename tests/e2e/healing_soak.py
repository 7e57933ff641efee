"""Kill or stop an instance at many moments, and compare every stream with the undisturbed one.

    python -m tests.e2e.healing_soak [--moments 50] [--seed 0]

Half of the moments are SIGKILL, half SIGSTOP; prefill and decode take turns; the cluster is 2P2D
in float32. Each moment disturbs six streams: greedy, drawn, with a stop string, two answers to one
prompt, with logprobs, and after a JSON schema. Prints what was healed and the
longest silence a client saw. Not part of ``make test``: it takes minutes.
"""

import argparse
import random
import signal

from tests.e2e.harness import START_TIMEOUT_S, eventually, serve
from tests.e2e.test_healing import MORE_WAYS, PROMPT, WAYS, check, disturb

OPTIONS = ("--prefill", "2", "--decode", "2", "--dtype", "float32", "--weights", "float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    asked_for = parser.parse_args()
    chance = random.Random(asked_for.seed)
    healed = streams = 0
    ways = [*WAYS, *MORE_WAYS]
    longest_s = {signal.SIGKILL: 0.0, signal.SIGSTOP: 0.0}
    with serve("demo", *OPTIONS, "--disaggregate-from", "0") as cluster:
        expected = [cluster.generate(prompt=PROMPT, **way) for way in ways]
        for moment in range(asked_for.moments):
            how = signal.SIGKILL if moment % 2 else signal.SIGSTOP
            role = "prefill" if moment // 2 % 2 else "decode"
            moment_s = chance.uniform(0.0, 0.6)
            eventually(lambda: cluster.all_ready(4), START_TIMEOUT_S, "all instances")
            asked = disturb(cluster, role, how, moment_s, ways)
            try:
                check(asked, expected)
            except AssertionError:
                print(f"moment {moment}: {how.name} of {role} after {moment_s:.3f} s")
                raise
            streams += len(asked)
            for each in asked:
                longest_s[how] = max(longest_s[how], each.longest_pause_s)
                assert each.got is not None and each.got.finished is not None
                healed += each.got.finished.timeline.attempts > 1
        eventually(cluster.held_nothing, 10, "everything free")
    print(f"{streams} of {streams} streams equal the undisturbed ones; {healed} were healed")
    for how, pause_s in longest_s.items():
        print(f"longest silence, {how.name}: {pause_s:.2f} s")


if __name__ == "__main__":
    main()
