#!/usr/bin/env bash
# Does to real runs what happens to long ones, several rounds of each fault at random moments, and
# prints what came of it: kills, a full disk, damaged files, a second trainer, wrong configurations.
#
#   scripts/fault_drill.sh [rounds of each fault, 2 by default]
#
# PYTHON chooses the interpreter. Faults that need a file system of their own are skipped where none
# can be mounted. A round takes half a minute. Ends with 1 if something was lost.
set -uo pipefail
cd "$(dirname "$0")/.."

report=$(mktemp) || exit
trap 'rm -f "$report"' EXIT
FAULT_ROUNDS=${1:-2} "${PYTHON:-python3}" -m pytest tests/experiments/test_faults.py \
  --junitxml="$report" -o junit_family=xunit1 -o addopts= -q
status=$?
"${PYTHON:-python3}" - "$report" <<'PYTHON'
import sys
import xml.etree.ElementTree as xml

print('\n| fault | round | outcome | seconds |\n|---|---:|---|---:|')
for case in xml.parse(sys.argv[1]).iter('testcase'):
    name, _, round_ = case.get('name').partition('[')[2].rstrip(']').rpartition('-')
    seen = [x.get('value') for x in case.iter('property')]
    outcome = 'nothing lost'
    for kind in ('failure', 'error', 'skipped'):
        for found in case.iter(kind):
            outcome = f'{kind}: {found.get("message", "").splitlines()[0][:120]}'
    outcome = ': '.join([outcome, *seen])
    print(f'| {name.replace("_", " ")} | {round_} | {outcome} | {float(case.get("time")):.0f} |')
PYTHON
exit "$status"
