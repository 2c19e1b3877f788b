"""Numbers as people read them."""


def size(number: float) -> str:
    """Bytes in readable units of 1024: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def count(number: float) -> str:
    """A count in readable units of 1000: 6738415616 -> '6.74 G' (the unit's letter last, to go before another word)."""
    for unit in ("", "K", "M", "G", "T", "P", "E", "Z"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} Y"
