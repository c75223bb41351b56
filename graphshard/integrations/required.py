"""Whether a framework is there, and new enough."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from graphshard.errors import IntegrationError


def require(package: str, least: tuple[int, int]) -> None:
    """Raises IntegrationError (GS1301) if `package` is missing or older than `least`."""
    wanted = ".".join(map(str, least))
    try:
        found = version(package)
    except PackageNotFoundError:
        found = ""
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if numbers < least:
        what = f"{package} {found} is here" if found else f"{package} is not installed"
        raise IntegrationError(
            "GS1301", f"{what}, and {wanted} or newer is needed: pip install '{package}>={wanted}'"
        )
