"""``python -m tests.simulation``: many runs, or one that went wrong, with its whole log."""

import argparse
import logging
import multiprocessing
import os
import sys
import time

from tests.simulation.runs import Report, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="one run, with its log")
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if args.seed is not None:
        return _one(run_seed(args.seed))
    began_s, bad = time.monotonic(), 0
    with multiprocessing.Pool(args.processes) as pool:
        seeds = range(args.first, args.first + args.runs)
        for report in pool.imap_unordered(_quick, seeds, chunksize=50):
            if report is not None:
                bad += 1
                print(f"seed {report.scenario.seed}: {report.told}\n", flush=True)
    took_s = time.monotonic() - began_s
    print(f"{args.runs} runs, {bad} wrong, {took_s:.0f} s, {args.runs / took_s:.0f} runs/s")
    return 1 if bad else 0


def _quick(seed: int) -> Report | None:
    report = run_seed(seed)
    return report if report.wrong is not None else None


def _one(report: Report) -> int:
    print(report.scenario)
    print("\n".join(report.log))
    if report.wrong is not None:
        print(f"wrong: {report.wrong!r}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
