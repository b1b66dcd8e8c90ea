"""Where a run lies: a folder on this machine, or a prefix of an object store.

A folder is a `pathlib.Path`. A prefix is a `StorePath`, which goes by the same names for the little that a run needs: whole
objects are put, read, listed and removed; nothing is appended to, nothing is renamed.

    half an object    a file is written here first and sent whole; its size is compared once it is there. A Parquet object
                      is no data before its commit, which is put after it; commits and settings carry their own checksum.
    put once          an object that is there is not put again, and what was put is read back. Two machines that put
                      one name within the same milliseconds can both believe they were first, so the names of what matters
                      are not shared: a commit has its attempt and writer in its name. Writers of one machine are kept
                      apart by a lock in the state folder.
    no answer         `Unreachable`, after three tries or seven seconds of them; the recorder keeps what it has in its journal
                      and tries again.

An object store has no place for a journal, which grows by every trace. It stays on this machine, in the state folder:
`$ROLLTAPE_STATE`, else `$XDG_STATE_HOME/rolltape`, else `~/.local/state/rolltape`, one folder a run below.

Amazon's S3 and what speaks it need nothing more than pyarrow, and take the usual variables: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL, AWS_MAX_ATTEMPTS. So do gs://, abfs:// and
hdfs://, as pyarrow knows them (GOOGLE_APPLICATION_CREDENTIALS, AZURE_TENANT_ID and so on), with its options behind a `?`, such
as `gs://bucket/run?retry_limit_seconds=60`; every other scheme is fsspec's.
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

from rolltape.schema.errors import BadInput, MissingExtra, Unreachable, install

STATE_VARIABLE = "ROLLTAPE_STATE"
READERS = 16
"""Small objects that are read at once: each costs a journey to the store."""
PIECE = 8 << 20
PATIENCE = 7
"""Seconds for which Google's store is asked again where it does not answer; its own default is 15 minutes."""
_NATIVE = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_BUCKETS = {"s3": "bucket", "gs": "bucket", "gcs": "bucket", "abfs": "container", "abfss": "container"}
"""What the first part of a path is, where it has to be made before anything is put."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)://(.*)", re.DOTALL)
_MANGLED = re.compile(rf"({'|'.join(_NATIVE)}):/([^/].*)", re.DOTALL)
_NOISE = re.compile(
    r"^When [^:]*: |\s*\(Request ID: [^)]*\)|\s*Detail: .*|google::cloud::Status\(|\s*error_info=\{.*|N5Azure\w+: |\n.*",
    re.DOTALL,
)
_SIGNS = ("AWS Error", "google::cloud", "Azure", "curlCode")
_NO_NETWORK = re.compile(
    r"NETWORK_CONNECTION|UNAVAILABLE|CURL error|curlCode|Couldn't connect|resolve host", re.IGNORECASE
)
_NO_BUCKET = re.compile(r"NO_SUCH_BUCKET|ContainerNotFound|bucket does not exist", re.IGNORECASE)
_REFUSED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN_ID|EXPIRED_TOKEN|PERMISSION_DENIED|"
    r"UNAUTHENTICATED|OAuth2|Authentication|AuthorizationFailure|HTTP status 40[13]",
    re.IGNORECASE,
)

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

    @property
    def missing_bucket(self) -> str | None:
        """A sentence where the bucket or container that this lies in is not there; None where it is, or that is not told."""
        scheme, bucket = self.url.partition(":")[0], self.key.partition("/")[0]
        if scheme not in _BUCKETS:
            return None
        with suppress(OSError, pa.ArrowException):  # who may read a prefix may not always ask for the bucket
            if self.files.get_file_info(bucket).type == fs.FileType.NotFound:
                return _no_bucket(self.url)
        return None

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

    def folders(self) -> tuple[list[StorePath], list[str]]:
        """What lies directly below: prefixes that have more below them, sorted, and names of objects. Costs a listing."""
        with _told(self):
            found = self.files.get_file_info(fs.FileSelector(self.key, allow_not_found=True))
        names = [(info.path[len(self.key) + 1 :], info.type) for info in found]
        below = sorted(self / name for name, type_ in names if type_ == fs.FileType.Directory)
        return below, [name for name, type_ in names if type_ == fs.FileType.File]

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

    Raises BadInput for a URL that names nothing and a path that is no UTF-8, MissingExtra where its scheme needs a package.
    """
    if isinstance(where, StorePath):
        return where if state is None else replace(where, state=_state(where.url, state))
    found = _parsed(where)
    if found is None:
        return _named_in_utf8(Path(where))
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file":
        return Path(unquote(urlsplit(str(where)).path))
    url = f"{scheme}://{rest.rstrip('/')}"
    files, key = _opened(scheme, url, os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"))
    name = url.partition("?")[0].rstrip("/") if scheme in _NATIVE else url
    return StorePath(name, key, files, _state(url, state))


def _named_in_utf8(path: Path) -> Path:
    """`path`. Raises BadInput where its name, or that of a folder it lies in, is no UTF-8: Arrow opens no such file."""
    try:
        for part in (path,) if path.is_absolute() else (path, Path.cwd()):
            str(part).encode()
    except UnicodeEncodeError:
        shown = str(part).encode(errors="backslashreplace").decode()
        raise BadInput(
            f"{shown}: the name is no UTF-8, and no file below it can be opened; rename the folder, or choose another."
        ) from None
    except FileNotFoundError:  # the current folder was removed
        pass
    return path


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
        if scheme in ("gs", "gcs"):
            files, key = fs.FileSystem.from_uri(_patient(url))
        elif scheme in _NATIVE:
            files, key = fs.FileSystem.from_uri(url)
        else:
            files, key = _of_fsspec(url)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInput(f"{url} cannot be opened as a place: {_plain(error)}.") from error
    return files, key.rstrip("/")


def _patient(url: str) -> str:
    """A URL of Google's store that says for how long to try again."""
    if "retry_limit_seconds=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}retry_limit_seconds={PATIENCE}"


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
            f"{url} needs fsspec, which is not installed: {install('fsspec')}; s3://, gs:// and abfs:// do not."
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
        raise Unreachable(_sentence(path.url, error)) from error


def _sentence(url: str, error: Exception) -> str:
    """What a store's error says, and what to do about it."""
    said, plain = str(error), _plain(error)
    if _NO_BUCKET.search(said):
        return _no_bucket(url)
    if not _NO_NETWORK.search(said) and (_REFUSED.search(said) or isinstance(error, PermissionError)):
        return f"{url}: the store refused it for want of credentials that are right ({plain}). {_credentials(url)}"
    return (
        f"{url}: the store did not do it ({plain}). Check the address, the network, the credentials in the environment, and "
        "AWS_ENDPOINT_URL for a store that is not Amazon's."
    )


def _no_bucket(url: str) -> str:
    scheme, _, rest = url.partition("://")
    what, bucket = _BUCKETS.get(scheme, "bucket"), rest.partition("/")[0]
    where = " and AWS_ENDPOINT_URL and AWS_REGION, which say where it is looked for" if scheme == "s3" else ""
    return f"{scheme}://{bucket}: there is no such {what}. Check its name{where}, or make it: rolltape does not."


def _credentials(url: str) -> str:
    scheme = url.partition(":")[0]
    if scheme == "s3":
        return (
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to those of somebody who may list, read and "
            "write there, and AWS_ENDPOINT_URL for a store that is not Amazon's."
        )
    if scheme in ("gs", "gcs"):
        return "Set GOOGLE_APPLICATION_CREDENTIALS to the key file of an account that may list, read and write there."
    if scheme in ("abfs", "abfss"):
        return "Set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, or log in with `az login`."
    return f"Set those that fsspec takes for {scheme}:// to an account that may list, read and write there."


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
