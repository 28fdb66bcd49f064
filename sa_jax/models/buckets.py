"""Few sizes for many lengths, so that few programs are compiled."""


def bucket(length: int, *, smallest: int = 16) -> int:
    """The least of `smallest`, 1.5 times it, twice it, three times it, … that isn't below `length`.

    Args:
      length: What has to fit.
      smallest: The least size, a power of two.

    Returns:
      A power of two, or 1.5 times one: at most half as much again as `length`, from `smallest` on.
    """
    size = smallest
    while size < length:
        is_power = size & (size - 1) == 0
        size = max(size + 1, size * 3 // 2 if is_power else size * 4 // 3)
    return size
