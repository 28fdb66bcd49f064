"""What a compiled program sends between devices, read from its HLO.

Loops count as often as they run, so that a scan over layers shows what all layers send.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
_BITS = {'pred': 8, 's4': 4, 'u4': 4, 'bf16': 16, 'c64': 64, 'c128': 128}
_HEAD = re.compile(r'^(?:ENTRY )?%?([\w.\-]+)(?: \(.*)? (?:->.*)?\{$')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\((.*)$')
_ARRAY = re.compile(r'\b([a-z]+\d*\w*)\[([\d,]*)\]')
_CALLED = re.compile(
    r'(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)'
)
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Collective:
    """A kind of message with one size.

    Attributes:
      kind: of `KINDS`.
      size: bytes on each device: of the result, of the operand for 'reduce-scatter'.
      count: how often it is sent in a run of the program.
    """

    kind: str
    size: int
    count: int


def collectives(text: str) -> list[Collective]:
    """The messages of a program, the largest total first.

    Args:
      text: of `jax.stages.Compiled.as_text`.

    Raises:
      ValueError: a loop that sends something runs an unknown number of times.
    """
    bodies, entry = _computations(text)
    found: Counter[tuple[str, int]] = Counter()
    _count(entry, 1, bodies, found)
    rows = [Collective(kind, size, count) for (kind, size), count in found.items()]
    return sorted(rows, key=lambda x: (-x.size * x.count, x.kind, x.size))


def totals(found: list[Collective]) -> dict[str, tuple[int, int]]:
    """How many messages of each kind there are, and their bytes."""
    return {
        kind: (
            sum(x.count for x in found if x.kind == kind),
            sum(x.count * x.size for x in found if x.kind == kind),
        )
        for kind in KINDS
        if any(x.kind == kind for x in found)
    }


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation by its name, and the name of the one that is run."""
    bodies: dict[str, list[str]] = {}
    entry = name = ''
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head and ' = ' not in line.split('{')[0]:
            name = head[1]
            bodies[name] = []
            if line.startswith('ENTRY'):
                entry = name
        elif name:
            bodies[name].append(line)
    if not entry:
        raise ValueError('the text has no ENTRY computation; expected that of a compiled program')
    return bodies, entry


def _count(name: str, times: int, bodies: dict[str, list[str]], found: Counter) -> None:
    for line in bodies[name]:
        instruction = _INSTRUCTION.match(line)
        if not instruction:
            continue
        shape, operation, rest = instruction.groups()
        kind = operation.removesuffix('-start')
        if kind in KINDS:
            found[kind, _size(kind, operation, shape, rest)] += times
            continue  # what it calls adds numbers
        for called in _called(rest):
            if called not in bodies:
                continue
            if operation != 'while':
                _count(called, times, bodies, found)
                continue
            trips = _TRIPS.search(rest)
            inner: Counter = Counter()
            _count(called, 1, bodies, inner)
            if inner and not trips:
                raise ValueError(f'{called} sends something, but how often it runs is unknown')
            for key, count in inner.items():
                found[key] += times * int(trips[1]) * count


def _called(rest: str) -> Iterator[str]:
    yield from _CALLED.findall(rest)
    for names in _BRANCHES.findall(rest):
        yield from (name.strip().lstrip('%') for name in names.split(','))


def _size(kind: str, operation: str, shape: str, rest: str) -> int:
    # Behind the operand, or a tuple of them; a reduction's start may name its result alone.
    if operation.endswith('-start') and (kind != 'all-reduce' or shape.startswith('((')):
        shape = _elements(shape)[1]
    size = sum(map(_bytes, _ARRAY.findall(shape)))
    return size * _group(rest) if kind == 'reduce-scatter' else size


def _elements(shape: str) -> list[str]:
    """The elements of a tuple's type."""
    elements, depth = [''], 0
    for character in shape[1:-1]:
        depth += (character in '([{') - (character in ')]}')
        if character == ',' and not depth:
            elements.append('')
        else:
            elements[-1] += character
    return elements


def _group(rest: str) -> int:
    """How many devices take part in a message: groups are listed, counted, or axes of a mesh."""
    if listed := re.search(r'replica_groups=\{\{([\d,]*)\}', rest):
        return len(listed[1].split(','))
    if counted := re.search(r'replica_groups=\[\d+,(\d+)\]', rest):
        return int(counted[1])
    if mesh := re.search(r'replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}', rest):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[name]) for name, part in axes)
    raise ValueError(f'how many devices take part is unknown: {rest[:200]}')


def _bytes(array: tuple[str, str]) -> int:
    name, shape = array
    bits = _BITS.get(name) or int(re.search(r'\d+', name)[0])
    return math.prod(int(x) for x in shape.split(',') if x) * bits // 8
