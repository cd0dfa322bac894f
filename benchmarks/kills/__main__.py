"""Whether clients notice that processes of a service die.

    python -m benchmarks.kills [--pairs 4] [--routers 2] [--streams 64] [--kills 30] [--seed 0] [--out FILE]

A tiny random model is served on this machine: ``--pairs`` pairs of verifier and proposer, ``--routers`` routers and a
Redis. First the answers of ``--conversations`` conversations are recorded in quiet. Then ``--streams`` streams are
kept open, greedy and seeded, of one to three turns, while ``--kills`` random processes end by SIGKILL: of ten victims
four are verifiers, two proposers, three times Redis (which is started again after two seconds) and one router. The
service is whole again when all processes run, every verifier has a proposer and every router answers and has its Redis;
the next kill comes twice as long after the last one. Every stream that finished must equal the recorded answer: token
ids, text, finish reason, usage. A stream whose own router was killed may end.

Exit status 1 when a stream differs or was lost. Ctrl-C ends the killing early; what was found until then is told.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.kills.run import Plan, run_kills
from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.report import conditions_lines
from eagle2.operations.argument_types import positive_int


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether clients notice that processes of a service die.")
    parser.add_argument("--pairs", type=positive_int, default=4, help="pairs of verifier and proposer")
    parser.add_argument("--routers", type=positive_int, default=2)
    parser.add_argument("--streams", type=positive_int, default=64, help="streams that are open at a time")
    parser.add_argument("--kills", type=positive_int, default=30)
    parser.add_argument("--conversations", type=positive_int, default=120, help="different ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all that was found, as JSON")
    arguments = parser.parse_args()
    began, load = time.monotonic(), os.getloadavg()[0]
    plan = Plan(
        pairs=arguments.pairs,
        routers=arguments.routers,
        streams=arguments.streams,
        kills=arguments.kills,
        conversations=arguments.conversations,
        seed=arguments.seed,
    )

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:6.0f} s] {line}", flush=True)

    with tempfile.TemporaryDirectory(prefix="e2kills") as folder:
        report = run_kills(plan, Path(folder), say=say)
    conditions = Conditions.now(load)
    if arguments.out is not None:
        result = {"plan": asdict(plan), "conditions": asdict(conditions), **report.as_dict()}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for problem in report.problems[:10]:
        print(f"FAILED: {problem}")
    print("\n| streams | |\n| --- | ---: |")
    for fate, count in report.streams.items():
        print(f"| {fate} | {count} |")
    print(f"\n- Kills: {report.kills}; streams that left a verifier, by reason: {report.moves}")
    print("\n| seconds | count | p50 | p99 | most |\n| --- | ---: | ---: | ---: | ---: |")
    rows = {f"stall: {name}": summary for name, summary in report.stalls.items()}
    rows |= {f"recovery: {kind}": summary for kind, summary in report.recovery_s.items()}
    for name, summary in rows.items():
        cells = " | ".join(f"{summary[key]:.2f}" for key in ("p50", "p99", "most") if key in summary)
        print(f"| {name} | {summary['count']} | {cells or ' | | '} |")
    print(f"\n{conditions_lines(conditions)}")
    print("clean" if report.is_clean else "NOT CLEAN")
    return 0 if report.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
