"""Where a run lies: a folder on this machine, or a prefix of an object store.

A folder is a `pathlib.Path`. A prefix is a `StorePath`, which goes by the same names for the little that a run needs: whole
objects are put, read, listed and removed; nothing is appended to, nothing is renamed.

    half an object    a file is written here first and sent whole; its size is compared once it is there. A Parquet object
                      is no data before its commit, which is put after it; commits and settings carry their own checksum.
    put once          an object that is there is not put again, and what was put is read back. Two machines that put
                      one name within the same milliseconds can both believe they were first, so the names of what matters
                      are not shared: a commit has its attempt and writer in its name. Writers of one machine are kept
                      apart by a lock in the state folder.
    no answer         `Unreachable`; the recorder keeps what it has in its journal and tries again.

An object store has no place for a journal, which grows by every trace. It stays on this machine, in the state folder:
`$ROLLTAPE_STATE`, else `$XDG_STATE_HOME/rolltape`, else `~/.local/state/rolltape`, one folder a run below.

Amazon's S3 and what speaks it need nothing more than pyarrow, and take the usual variables: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL, AWS_MAX_ATTEMPTS. So do gs://, abfs:// and
hdfs://, as pyarrow knows them; every other scheme is fsspec's.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from rolltape.schema.errors import BadInput, MissingExtra, Unreachable

STATE_VARIABLE = "ROLLTAPE_STATE"
READERS = 16
"""Small objects that are read at once: each costs a journey to the store."""
PIECE = 8 << 20
_NATIVE = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)://(.*)", re.DOTALL)
_MANGLED = re.compile(rf"({'|'.join(_NATIVE)}):/([^/].*)", re.DOTALL)
_NOISE = re.compile(r"^When [^:]*: |\s*\(Request ID: [^)]*\)|\s*Detail: .*", re.DOTALL)
_SIGNS = ("AWS Error", "google::cloud", "Azure", "curlCode")

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, order=True)
class StorePath:
    """An object, or what lies below a prefix, in an object store. Made by `place`."""

    url: str
    """Without a slash at its end."""
    key: str
    """The path as the file system below knows it."""
    files: fs.FileSystem = field(compare=False, repr=False)
    state: Path = field(compare=False, repr=False)
    """Folder on this machine for what belongs to the run and cannot lie in the store."""

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str | Path) -> StorePath:
        return replace(self, url=f"{self.url}/{name}", key=f"{self.key}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The last part without its ending."""
        return Path(self.name).stem

    @property
    def suffix(self) -> str:
        """The ending, with its dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> StorePath:
        """What it lies in."""
        return replace(self, url=self.url.rpartition("/")[0], key=self.key.rpartition("/")[0])

    def with_name(self, name: str) -> StorePath:
        """Another in the same place."""
        return self.parent / name

    def absolute(self) -> StorePath:
        """Itself."""
        return self

    def resolve(self) -> StorePath:
        """Itself."""
        return self

    # -- what is there

    def exists(self) -> bool:
        """Whether there is such an object, or any below it."""
        return bool(self._info().type != fs.FileType.NotFound)

    def is_file(self) -> bool:
        """Whether it is an object."""
        return bool(self._info().type == fs.FileType.File)

    def is_dir(self) -> bool:
        """Whether objects lie below it."""
        return bool(self._info().type == fs.FileType.Directory)

    def size(self) -> int:
        """Bytes of the object. Raises FileNotFoundError."""
        info = self._info()
        if info.type != fs.FileType.File:
            raise FileNotFoundError(2, "No such object", self.url)
        return int(info.size)

    def _info(self) -> fs.FileInfo:
        with _told(self):
            return self.files.get_file_info(self.key)

    def sizes(self, pattern: str) -> dict[AnyPath, int]:
        """Objects below this by a pattern such as `*.json` or `*/*.parquet`, sorted, with their bytes. Costs a listing."""
        depth = pattern.count("/") + 1
        with _told(self):
            found = self.files.get_file_info(fs.FileSelector(self.key, recursive=depth > 1, allow_not_found=True))
        begin = len(self.key) + 1
        objects = [(info.path[begin:], int(info.size)) for info in found if info.type == fs.FileType.File]
        return {self / name: size for name, size in sorted(objects) if _fits(name, pattern)}

    def glob(self, pattern: str) -> Iterator[AnyPath]:
        """Objects below this by a pattern, sorted."""
        yield from self.sizes(pattern)

    def iterdir(self) -> Iterator[StorePath]:
        """What lies directly below."""
        with _told(self):
            found = self.files.get_file_info(fs.FileSelector(self.key, allow_not_found=True))
        yield from sorted(self / info.path[len(self.key) + 1 :] for info in found)

    # -- reading

    def read_bytes(self) -> bytes:
        """The whole object. Raises FileNotFoundError."""
        with self.open() as file, _told(self):
            return bytes(file.read())

    def open(self, mode: str = "rb") -> Any:
        """The object for reading anywhere in it. Raises FileNotFoundError."""
        if mode != "rb":
            raise BadInput(f"{self.url}: an object can be read or put whole, not opened with {mode!r}.")
        with _told(self):
            return self.files.open_input_file(self.key)

    # -- writing

    def put(self, data: bytes) -> None:
        """Put a small object, in place of one that is there."""
        with _told(self), self.files.open_output_stream(self.key) as out:
            out.write(data)

    def put_once(self, data: bytes) -> bool:
        """Put a small object that is not there yet; False where it is."""
        if self.exists():
            return False
        self.put(data)
        return self.read_bytes() == data

    def upload(self, source: Path) -> None:
        """Put a file as an object. Raises Unreachable where it is not there as long as the file afterwards."""
        length = source.stat().st_size
        with source.open("rb") as file, _told(self), self.files.open_output_stream(self.key) as out:
            while piece := file.read(PIECE):
                out.write(piece)
        if (found := self.size()) != length:
            raise Unreachable(f"{self.url}: {length} bytes were sent and {found} are there; it is not used.")

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """A name on this machine for a file on its way to the store; removed afterwards."""
        folder = self.state / "staging"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f".{self.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object. Raises FileNotFoundError."""
        try:
            with _told(self):
                self.files.delete_file(self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise


AnyPath = Path | StorePath
"""A place: on this machine or in a store."""


def place(where: str | Path | StorePath, state: str | Path | None = None) -> AnyPath:
    """The place that a path or URL names. `state`: folder for state folders instead of the default one.

    Raises BadInput for a URL that names nothing, MissingExtra where its scheme needs a package.
    """
    if isinstance(where, StorePath):
        return where if state is None else replace(where, state=_state(where.url, state))
    found = _parsed(where)
    if found is None:
        return Path(where)
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file":
        return Path(unquote(urlsplit(str(where)).path))
    url = f"{scheme}://{rest.rstrip('/')}"
    files, key = _opened(scheme, url, os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"))
    return StorePath(url, key, files, _state(url, state))


def is_url(where: str | Path | StorePath) -> bool:
    """Whether `where` names a place by a URL."""
    return _parsed(where) is not None


def _parsed(where: str | Path | StorePath) -> re.Match[str] | None:
    """Scheme and rest of a URL; a Path made of one has lost one of two slashes."""
    return _URL.fullmatch(str(where)) or _MANGLED.fullmatch(str(where))


def _state(url: str, base: str | Path | None) -> Path:
    default = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "rolltape"
    readable = re.sub(r"[^A-Za-z0-9]+", "-", url.partition("://")[2]).strip("-")[-60:]
    folder = Path(base or os.environ.get(STATE_VARIABLE) or default).expanduser().absolute()
    return folder / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


@functools.lru_cache(maxsize=32)
def _opened(scheme: str, url: str, endpoint: str | None) -> tuple[fs.FileSystem, str]:
    """The file system of a URL, and the path of the URL in it."""
    if scheme == "s3":
        key = url.partition("://")[2]
        if not key or "?" in key:
            raise BadInput(
                f"{url} names no place; write s3://bucket/prefix. Region, endpoint and credentials are taken from AWS_REGION, "
                "AWS_ENDPOINT_URL and the other usual variables."
            )
        return _s3(key.partition("/")[0], endpoint), key
    try:
        if scheme in _NATIVE:
            files, key = fs.FileSystem.from_uri(url)
        else:
            files, key = _of_fsspec(url)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInput(f"{url} cannot be opened as a place: {_plain(error)}.") from error
    return files, key.rstrip("/")


def _s3(bucket: str, endpoint: str | None) -> fs.FileSystem:
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None:
        region = "us-east-1" if endpoint else _region(bucket)
    return fs.S3FileSystem(
        region=region,
        endpoint_override=endpoint,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_attempts()),
        connect_timeout=5,
        request_timeout=20,
        allow_delayed_open=True,  # small objects are put by one request
    )


def _attempts() -> int:
    said = os.environ.get("AWS_MAX_ATTEMPTS") or "3"
    if not said.isdecimal() or not int(said):
        raise BadInput(f"AWS_MAX_ATTEMPTS is {said!r}; expected a whole number from 1 on.")
    return int(said)


def _region(bucket: str) -> str:
    try:
        return str(fs.resolve_s3_region(bucket))
    except OSError as error:
        raise Unreachable(
            f"s3://{bucket}: its region cannot be told ({_plain(error)}); set AWS_REGION, and AWS_ENDPOINT_URL for a store "
            "that is not Amazon's."
        ) from error


def _of_fsspec(url: str) -> tuple[fs.FileSystem, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingExtra(
            f"{url} needs fsspec, which is not installed: pip install 'rolltape[fsspec]'; s3://, gs:// and abfs:// do not."
        ) from error
    try:
        files, key = url_to_fs(url)
    except ImportError as error:
        raise MissingExtra(f"{url} needs a package that is not installed: {error}.") from error
    return fs.PyFileSystem(fs.FSSpecHandler(files)), key


@contextmanager
def _told(path: StorePath) -> Iterator[None]:
    """Say by a sentence what a store would not do. FileNotFoundError passes."""
    try:
        yield
    except (FileNotFoundError, Unreachable):
        raise
    except NotImplementedError as error:  # as of fsspec's http
        raise BadInput(
            f"{path.url}: {path.url.partition(':')[0]} has no way to do this; a run needs a store that can be listed, read and "
            "written, such as s3://."
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise Unreachable(
            f"{path.url}: the store did not do it ({_plain(error)}). Check the address, the credentials in the environment, "
            "and AWS_ENDPOINT_URL for a store that is not Amazon's."
        ) from error


def is_silence(error: BaseException) -> bool:
    """Whether an error that came up while an object was read is the store's or the network's, not one of the bytes."""
    return isinstance(error, (ConnectionError, TimeoutError)) or any(sign in str(error) for sign in _SIGNS)


def _plain(error: BaseException) -> str:
    return _NOISE.sub("", str(error)).strip().rstrip(".") or type(error).__name__


def _fits(relative: str, pattern: str) -> bool:
    names, wanted = relative.split("/"), pattern.split("/")
    return len(names) == len(wanted) and all(map(fnmatch.fnmatchcase, names, wanted))


# -- for both kinds


def size_of(path: AnyPath) -> int:
    """Bytes of a file or object. Raises FileNotFoundError."""
    return path.size() if isinstance(path, StorePath) else path.stat().st_size


def sha256_of(path: AnyPath) -> str:
    """sha256 of a file or object, in hex. Raises FileNotFoundError."""
    if not isinstance(path, StorePath):
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    sum_ = hashlib.sha256()
    with path.open() as object_, _told(path):
        while piece := object_.read(PIECE):
            sum_.update(piece)
    return sum_.hexdigest()


def listed(folder: AnyPath, pattern: str) -> list[AnyPath]:
    """Files below `folder` by a pattern such as `*/*.json`, sorted; none where there is no folder."""
    if isinstance(folder, StorePath):
        return list(folder.sizes(pattern))
    return sorted(folder.glob(pattern))


def sizes(folder: AnyPath, pattern: str) -> dict[AnyPath, int]:
    """`listed` with the bytes of each file."""
    if isinstance(folder, StorePath):
        return folder.sizes(pattern)
    found: dict[AnyPath, int] = {}
    for path in sorted(folder.glob(pattern)):
        with suppress(FileNotFoundError):  # removed meanwhile
            found[path] = path.stat().st_size
    return found


def each(function: Callable[[T], R], items: Iterable[T], remote: bool) -> Iterator[R]:
    """`function` of each item in order; of those in a store several at a time."""
    if not remote:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(function, items)
