"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], *rows: Iterable[str], texts: int = 1) -> str:
    """A table whose first columns are texts and the others numbers, which stand to the right."""
    rule = ['---' if place < texts else '---:' for place in range(len(header))]
    return '\n'.join(f'| {" | ".join(line)} |' for line in (header, rule, *rows))
