"""The errors rolltape raises. Every message is a sentence: what was found, what was expected, what to do."""

from __future__ import annotations


class RolltapeError(Exception):
    """Root of every error that rolltape raises on purpose."""


class BadInput(RolltapeError, ValueError):
    """A file, record, option or trace does not hold what it must hold."""


class UnsupportedVersion(RolltapeError, RuntimeError):
    """A file or an installed package has a version that this rolltape does not support."""


class MissingExtra(RolltapeError, ImportError):
    """Something needs an optional dependency that is not installed."""


def install(extra: str) -> str:
    """How to install an extra, for the end of a sentence: from a checkout, or to a rolltape that is installed already."""
    return f"pip install '.[{extra}]' in a checkout of rolltape, elsewhere pip install 'rolltape[{extra}]'"


class RunNotFound(RolltapeError, FileNotFoundError):
    """A path holds no recorded run."""


class RunConflict(RolltapeError, FileExistsError):
    """A folder already holds another run, or another writer's step."""


class Damaged(RolltapeError, OSError):
    """Bytes on disk are not what was written."""


class OtherRun(Damaged):
    """Rows of another run lie in the folder of this one."""


class Unreachable(RolltapeError, ConnectionError):
    """An object store did not answer, or did not do what was asked."""


class CheckFailed(RolltapeError, ValueError):
    """A check failed and `strict` was asked for."""
