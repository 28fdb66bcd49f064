"""Damage done to files: to their bytes, to the JSON in them, or below their compression."""

import json
import random
import re

_NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**63 - 1, 2**63, 2**64 - 1)
_MARK = '@here@'
_VALUES = (
    *map(str, _NUMBERS),
    *('null', 'true', '1.5', '1e999', '-1e-400', 'NaN', '-Infinity', '1' * 400, '1' * 5000),
    *('""', '"a"', '"../../a"', '"/etc/passwd"', '".."', '"\\u0000"', '"\\ud800"', '"-3:"'),
    *('[]', '{}', '[1, 2]', '["a", {}]', '{"a": 1}', '[' * 100_000, '{"a":' * 100_000),
    *('[' * 900 + ']' * 900, '"' + 'x' * 100_000 + '"', '"<|end|>"', '"a", "a": 1'),
)


def mutated(draw: random.Random, data: bytes) -> bytes:
    """A file's content, damaged."""
    if data[:4] == b'\x28\xb5\x2f\xfd' and draw.random() < 0.7:
        import zstandard

        plain = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        return zstandard.compress(mutated(draw, plain))
    for damage in draw.sample((_safetensors, _json, _lines), 3):
        if draw.random() < 0.7 and (result := damage(draw, data)) is not None:
            return result
    for _ in range(draw.choice((1, 1, 2, 4))):
        data = _bytes(draw, data)
    return data


def _bytes(draw, data):
    if not data:
        return draw.randbytes(8)
    # Headers and footers are more fragile than what lies between.
    start = int(len(data) ** draw.random())
    start = min(draw.choice((start, len(data) - start)), len(data) - 1)
    end = start + draw.choice((1, 4, 8, 64, len(data) // 4))
    width, number = draw.choice((1, 2, 4, 8)), draw.choice(_NUMBERS)
    replacement = draw.choice(
        (
            bytes([data[start] ^ 1 << draw.randrange(8)]) + data[start + 1 : end],
            draw.randbytes(end - start),
            data[start:end] * draw.choice((2, 3, 100)),
            draw.randbytes(draw.choice((1, 4, 100))) + data[start:end],
            (number % 256**width).to_bytes(width, 'little') + data[start + width : end],
            b'',
            None,
        )
    )
    if replacement is None:
        return data[:start]
    if draw.random() < 0.1:  # a number in text
        text = re.sub(rb'\d+', lambda _: str(number).encode(), data[start:], count=1)
        return data[:start] + text
    return data[:start] + replacement + data[end:]


def _json(draw, data):
    try:
        value = json.loads(data)
    except ValueError:
        return None
    spots = []

    def visit(node):
        children = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in children:
            spots.append((node, key))
            if isinstance(child, dict | list):
                visit(child)

    if not isinstance(value, dict | list):
        return None
    visit(value)
    if not spots or draw.random() < 0.02:
        return draw.choice(_VALUES).encode()
    node, key = draw.choice(spots)
    other, name = draw.choice(spots)
    match draw.randrange(8):
        case 0:
            del node[key]
        case 1:
            node[key] = json.loads(json.dumps(other[name]))
        case 2 if isinstance(node, dict):
            node[draw.choice(('a', '', 'x' * 10_000, '../a', '\0'))] = node.pop(key)
        case _:
            node[key] = _MARK
    return json.dumps(value).replace(f'"{_MARK}"', draw.choice(_VALUES)).encode()


def _lines(draw, data):
    lines = data.split(b'\n')
    number = draw.randrange(len(lines))
    line = len(lines) > 1 and _json(draw, lines[number])
    return b'\n'.join([*lines[:number], line, *lines[number + 1 :]]) if line else None


def _safetensors(draw, data):
    size = int.from_bytes(data[:8], 'little')
    header = _json(draw, data[8 : 8 + size]) if 8 < size < len(data) else None
    return header and len(header).to_bytes(8, 'little') + header + data[8 + size :]
