"""What a YAML file and the environment say, and the errors all sources share."""

import difflib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from loraplex.server.settings import Setting, spellings

ENV_PREFIX = "LORAPLEX_"
TEST_PREFIX = "LORAPLEX_TEST_"
SIMILAR = 0.75
"""Likeness, from 0 to 1, from which an unknown name is taken for a misspelt one: "prot" for "port" just is."""

REFUSED = {
    "gpu-memory-utilization": "refused, because its share counts the workspace of a step too; "
    "give --mem-fraction-static, the share of weights, adapters and KV alone",
    "trust-remote-code": "refused, because code that comes with a checkpoint is never run",
}


class FlagError(Exception):
    """One line for the person who started the server."""


@dataclass(frozen=True)
class Given:
    """A value and how it was written, for the messages."""

    value: Any
    written: str
    source: str


class Values:
    """What one source says, with contradictions refused."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.given: dict[str, Given] = {}

    def put(self, setting: Setting, value: Any, written: str) -> None:
        before = self.given.get(setting.field)
        if before is not None and setting.many and written.startswith("--"):
            value = before.value + value
        elif before is not None and before.value != value and before.written == written:
            raise FlagError(f"{self.source}: {written} is given twice ({before.value} and {value})")
        elif before is not None and before.value != value:
            raise FlagError(f"{self.source}: {written} contradicts {before.written}; give one of them")
        self.given[setting.field] = Given(value, written, self.source)


def unknown(source: str, written: str, known: Sequence[str]) -> NoReturn:
    """Raises the FlagError of a name that means nothing, with the nearest name that does."""
    bare = written.removeprefix("--").removeprefix(ENV_PREFIX).replace("_", "-").lower()
    if bare in REFUSED:
        raise FlagError(f"{source}: {written} is {REFUSED[bare]}")
    near = difflib.get_close_matches(bare, known, n=1, cutoff=SIMILAR)
    hint = f"; did you mean {_written_like(written, near[0])}?" if near else ""
    raise FlagError(f"{source}: {written} is unknown{hint}")


def _written_like(example: str, name: str) -> str:
    if example.startswith("--"):
        return f"--{name}"
    underscored = name.replace("-", "_")
    return ENV_PREFIX + underscored.upper() if example.startswith(ENV_PREFIX) else underscored


def read_file(path: str, known: list[Setting]) -> dict[str, Given]:
    """Settings of a YAML file: one mapping from flag names to values."""
    import yaml

    from loraplex.server.yaml_file import load_mapping, yaml_complaint

    try:
        content = load_mapping(Path(path))
    except OSError as error:
        raise FlagError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise FlagError(f"--config {path}: {yaml_complaint(error)}") from None
    return from_mapping(content, known, path)


def from_mapping(content: Mapping[Any, Any], known: list[Setting], source: str) -> dict[str, Given]:
    """Settings of names with values whose types are right already."""
    table = spellings(known)
    values = Values(source)
    for key, value in content.items():
        spelling = table.get(str(key).replace("_", "-"))
        if spelling is None:
            unknown(source, str(key), list(table))
        try:
            parsed = spelling.setting.from_yaml(value)
        except ValueError as error:
            raise FlagError(f"{source}: {key}: {error}") from None
        values.put(spelling.setting, not parsed if spelling.inverted else parsed, str(key))
    return values.given


def read_environment(environ: Mapping[str, str], known: list[Setting]) -> dict[str, Given]:
    """Settings of `LORAPLEX_*` variables. Lists are split as a shell would, or are JSON. Empty means not set."""
    table = spellings(known)
    values = Values("the environment")
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable.startswith(TEST_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).replace("_", "-").lower()
        if name == "config":
            continue
        spelling = table.get(name)
        if spelling is None:
            unknown("the environment", variable, [*table, "config"])
        if text == "":
            continue
        try:
            parsed = _from_variable(spelling.setting, text)
        except ValueError as error:
            raise FlagError(f"the environment: {variable}: {error}") from None
        values.put(spelling.setting, not parsed if spelling.inverted else parsed, variable)
    return values.given


def _from_variable(setting: Setting, text: str) -> Any:
    if not setting.many:
        return setting.from_text(text)
    if text.lstrip().startswith(("[", "{")):
        return setting.from_yaml(json.loads(text))
    return setting.items_from_text(shlex.split(text))
