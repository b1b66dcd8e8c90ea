"""The commit of a part: what its Parquet file must hold, with the groups and the step record.

A commit is put once, after its Parquet file is whole. It carries its own checksum, so that a flipped bit in it is found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import pyarrow as pa

from rolltape.schema.errors import Damaged
from rolltape.schema.fields import ROW, SCHEMA_VERSION, check_version
from rolltape.schema.jsontext import read_json
from rolltape.schema.parquet import Written
from rolltape.schema.paths import Part
from rolltape.schema.records import Group, Step
from rolltape.schema.scores import OF_PART, unpack_scores
from rolltape.schema.storage import AnyPath


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One part of a run as it was committed."""

    part: Part
    file: Written
    groups: Sequence[Group]
    step: Step
    sums: Mapping[str, Any] = field(default_factory=dict)
    """Tokens, sampled tokens and rewards over all rows, as the writer counted them."""
    fingerprint: str = ""
    written_at: float | None = None

    def score(self, name: str) -> pa.Array:
        """A column of SCORES of the part's rows. Raises KeyError and ValueError where the commit does not hold it."""
        if name in OF_PART:
            return pa.repeat(pa.scalar(getattr(self.part, name), ROW.by_name[name].arrow_type), self.file.rows)
        scores = self.file.scores
        return unpack_scores(scores if isinstance(scores, Mapping) else {}, name, self.file.rows)

    def to_bytes(self) -> bytes:
        """The commit as JSON with its checksum."""
        return sealed(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "schema": ".".join(map(str, SCHEMA_VERSION)),
            "part": self.part.to_dict(),
            "rows": self.file.rows,
            "bytes": self.file.bytes,
            "sha256": self.file.sha256,
            "fingerprint": self.fingerprint,
            "sums": dict(self.sums),
            **({} if self.file.scores is None else {"scores": dict(self.file.scores)}),
            "groups": [g.to_dict() for g in self.groups],
            "step": self.step.to_dict(),
            "written_at": self.written_at,
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Commit:
        """The inverse of `to_dict`."""
        return cls(
            part=Part.from_dict(body["part"]),
            file=Written(body["rows"], body["bytes"], body["sha256"], body.get("scores")),
            groups=_Groups(body["groups"]),
            step=Step.from_dict(body["step"]),
            sums=body["sums"],
            fingerprint=body["fingerprint"],
            written_at=body["written_at"],
        )

    @classmethod
    def read(cls, path: AnyPath) -> Commit:
        """Read a commit. Raises Damaged where it is cut or its checksum does not fit, UnsupportedVersion if it is newer."""
        return cls.from_dict(unsealed(path, SCHEMA_VERSION))


class _Groups(Sequence[Group]):
    """Group records, made when they are first looked at: opening a run reads every commit, and few ask for its groups."""

    def __init__(self, data: Sequence[Mapping[str, Any]]) -> None:
        self._data = data

    @cached_property
    def _made(self) -> list[Group]:
        return [Group.from_dict(g) for g in self._data]

    def __len__(self) -> int:
        return len(self._data)

    @overload
    def __getitem__(self, index: int) -> Group: ...

    @overload
    def __getitem__(self, index: slice) -> list[Group]: ...

    def __getitem__(self, index: int | slice) -> Group | list[Group]:
        return self._made[index]

    def __iter__(self) -> Iterator[Group]:
        return iter(self._made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made == list(other)

    def __repr__(self) -> str:
        return repr(self._made)

    __hash__ = None  # type: ignore[assignment]


def sealed(body: Mapping[str, Any]) -> bytes:
    """A commit's values as one line of JSON that ends with its checksum."""
    return _text({**body, "checksum": _checksum(body)})


def unsealed(path: AnyPath, known: tuple[int, int]) -> dict[str, Any]:
    """The inverse of `sealed`. Raises Damaged and UnsupportedVersion as `Commit.read`."""
    raw = path.read_bytes()
    try:
        body: dict[str, Any] = read_json(raw)
        checksum = body.pop("checksum")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise Damaged(
            f"{path}: no readable commit ({error or 'no checksum'}); it was cut short or overwritten. Restore it from a "
            "copy; the step's Parquet file is no data without it."
        ) from error
    check_version(body.get("schema"), str(path), known)
    content, mark, end = raw.rpartition(_CHECKSUM)
    if not mark or end != _end(checksum) or hashlib.sha256(content + b"}\n").hexdigest() != checksum:
        raise Damaged(f"{path}: the commit's checksum does not fit its content; restore the file from a copy.")
    return body


_CHECKSUM = b',"checksum":'
"""Begins the end of a commit. What comes before it is what the checksum is of, but for the closing bracket."""


def _end(checksum: Any) -> bytes:
    return f'"{checksum}"}}\n'.encode()


def _text(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, separators=(",", ":"), ensure_ascii=True) + "\n").encode()


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(body)).hexdigest()
