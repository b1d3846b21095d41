"""What a stored config was made for: the models, the calibration and the results, in a file beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers.utils.hub import PushToHubMixin, cached_file

from ..common.fields import assign, bad_value, nearest, shown
from ..common.json_files import MOST_BYTES, check_depth, read_object

FILE_NAME = "semspec.json"
FORMAT = 1
_LONGEST_NAME = 256


@dataclass(frozen=True, kw_only=True)
class Sidecar(PushToHubMixin):
    r"""
    Names what a `SemSpecConfig` was made for; kept beside it as `semspec.json`. Nothing in it changes a call.

    Args:
        target (`str`, *optional*):
            Hub id or folder of the target that the config was made for.
        draft (`str`, *optional*):
            Hub id or folder of its draft.
        calibration (`dict`, *optional*):
            How the thresholds were found: the `report` of `calibrate_easd` or `calibrate_parse`.
        results (`dict`, *optional*):
            What was measured with it, such as the `results.json` of `hf-semspec eval`.

    Raises:
        ValueError: If a name is no short line of text, or a dict is not JSON, too deep, or makes the file larger than
            a MiB.
    """

    target: str | None = None
    draft: str | None = None
    calibration: Mapping[str, Any] | None = None
    results: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("target", "draft"):
            _check_name(name, getattr(self, name))
        for name in ("calibration", "results"):
            assign(self, name, _plain_copy(name, getattr(self, name)))
        if len(self._text()) > MOST_BYTES:
            raise ValueError(
                f"calibration and results make {FILE_NAME} larger than {MOST_BYTES:,} bytes: leave out some"
            )

    def to_dict(self) -> dict[str, Any]:
        """The file's content: `{"format": 1, ...}` with the fields that are set."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        return {"format": FORMAT, **{name: value for name, value in own.items() if value is not None}}

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Sidecar:
        """
        The inverse of `to_dict`.

        Args:
            entries (`dict`): The file's content.

        Raises:
            ValueError: If an entry is unknown, malformed, or of a format later than this version's.
        """
        values = dict(entries)
        version = values.pop("format", None)
        if version != FORMAT or isinstance(version, bool):
            raise bad_value("format", version, f"{FORMAT}, the one that this version of hf-semspec reads")
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"unknown entry {shown(name)} in {FILE_NAME}; {nearest(name, known)}")
        return cls(**values)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **_: Any) -> None:
        """
        Writes `semspec.json` into a folder, which is made where it is missing.

        Args:
            save_directory: The folder.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE_NAME).write_text(self._text(), encoding="utf-8")

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **kwargs: Any) -> Sidecar:
        """
        Reads the file from a folder or a repository of the Hub.

        Args:
            name: The folder, or the Hub id.
            kwargs: `revision`, `token`, `cache_dir`, `local_files_only` and the like, as in every `from_pretrained`.

        Raises:
            OSError: If there is no such folder, repository or file.
            ValueError: If the file is malformed in any way.
        """
        return cls.from_dict(read_object(cached_file(str(name), FILE_NAME, **kwargs)))

    def _text(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"


def _check_name(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME or not value.isprintable():
        raise bad_value(name, value, f"a Hub id or a folder, one line of at most {_LONGEST_NAME} characters")


def _plain_copy(name: str, value: Any) -> dict[str, Any] | None:
    """`value` as JSON reads it back: no objects, no NaN, nothing shared with the caller."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise bad_value(name, value, "a dict")
    try:
        check_depth(f"`{name}`", value)
        copy: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"`{name}` must be a dict of finite JSON values: {error}") from None
    return copy
