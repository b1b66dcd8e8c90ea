"""What the live side needs installed, and why the upper bounds are where they are."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass

from rolltape.schema.errors import MissingExtra, UnsupportedVersion, install

INSTALL = install("live")


@dataclass(frozen=True)
class Requirement:
    """A package of the `live` extra: least version, first version that is too new, and the reason for the latter."""

    package: str
    module: str
    least: str | None = None
    below: str | None = None
    reason: str = ""

    @property
    def range(self) -> str:
        bounds = [f">={self.least}" if self.least else "", f"<{self.below}" if self.below else ""]
        return self.package + ",".join(bound for bound in bounds if bound)


REQUIREMENTS = (
    Requirement(
        "verifiers",
        "verifiers",
        "0.2.0",
        "0.2.1",
        "from 0.2.1 on verifiers needs openai>=2.9, while SGLang pins openai 2.6.1 or 2.8.0",
    ),
    Requirement(
        "renderers",
        "renderers",
        "0.1.8",
        "0.1.11",
        "renderers 0.1.11 removed RendererPool and client._maybe_offload, which verifiers 0.2.0 imports at the first "
        "request, so that every rollout fails",
    ),
    Requirement("mcp", "mcp", None, "2", "mcp 2 removed mcp.server.fastmcp, which verifiers 0.2.0 imports"),
    Requirement("transformers", "transformers"),
    Requirement("aiohttp", "aiohttp"),
)


def check_live() -> dict[str, str]:
    """The installed version of each package of the `live` extra.

    Raises UnsupportedVersion for Python below 3.11 or a package outside its range, MissingExtra for a missing one.
    """
    check_python(sys.version_info[:3])
    return {requirement.package: check_package(requirement) for requirement in REQUIREMENTS}


def check_python(version: tuple[int, int, int]) -> None:
    """Raise UnsupportedVersion below Python 3.11."""
    if version[:2] < (3, 11):
        found = ".".join(map(str, version))
        raise UnsupportedVersion(f"This is Python {found}; live rollouts need Python 3.11 or later, as Verifiers does.")


def check_package(requirement: Requirement) -> str:
    """The installed version of one package, if it is one that works."""
    try:
        raw = importlib.metadata.version(requirement.package)
    except importlib.metadata.PackageNotFoundError:
        raise _missing(requirement) from None
    if importlib.util.find_spec(requirement.module) is None:
        raise _missing(requirement)
    found = _release(raw)
    if requirement.least is not None and found < _release(requirement.least):
        raise UnsupportedVersion(
            f"{requirement.package} {raw} is installed; live rollouts need {requirement.range}: {INSTALL}."
        )
    if requirement.below is not None and found >= _release(requirement.below):
        raise UnsupportedVersion(
            f"{requirement.package} {raw} is installed; live rollouts need {requirement.range}, because "
            f"{requirement.reason}: {INSTALL}."
        )
    return raw


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, padded; a pre-release counts as its release, so 0.1.11.dev3 is too new as well."""
    match = re.match(r"v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
    if match is None:
        raise UnsupportedVersion(f"{version!r} is no version number; reinstall the live extra: {INSTALL}.")
    numbers = [int(part) for part in match[1].split(".")]
    return tuple(numbers + [0] * (6 - len(numbers)))


def _missing(requirement: Requirement) -> MissingExtra:
    return MissingExtra(f"{requirement.package} is not installed; live rollouts need {requirement.range}: {INSTALL}.")
