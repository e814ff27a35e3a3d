"""The fields of `engine.config` as settings: names, types and how a written value is read."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loraplex.engine.config import Config

KIND_WORDS: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Setting:
    """One field of one group, with its type taken apart."""

    group: str
    field: str
    kind: type
    choices: tuple[str, ...]
    optional: bool
    many: bool
    default: Any
    metadata: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.field.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, *self.metadata["aliases"])

    def from_text(self, text: str) -> Any:
        """A value written as text, on the command line or in a variable. Raises ValueError."""
        if self.kind is bool:
            return _bool_from_text(text)
        if self.kind is str:
            return self._checked_text(text)
        try:
            return self.kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is not {KIND_WORDS[self.kind]}") from None

    def from_yaml(self, value: Any) -> Any:
        """A value of a file, whose type must be right already. Raises ValueError."""
        if value is None and self.optional:
            return None
        if self.many:
            return tuple(self._one(item) for item in (value if isinstance(value, list) else [value]))
        return self._one(value)

    def items_from_text(self, texts: Sequence[str]) -> tuple[Any, ...]:
        return tuple(self._one(text) for text in texts)

    def _one(self, value: Any) -> Any:
        if self.metadata["item"] is not None:
            return self.metadata["item"](value)
        if self.metadata["amount"] and type(value) is int:
            value = str(value)
        accepted = (int, float) if self.kind is float else self.kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.kind is not bool):
            raise ValueError(f"{value!r} is not {KIND_WORDS[self.kind]}")
        return self._checked_text(value) if isinstance(value, str) else self.kind(value)

    def _checked_text(self, text: str) -> str:
        text = self.metadata["value_aliases"].get(text, text)
        if self.choices and text not in self.choices:
            raise ValueError(f"{text!r} is none of {', '.join(self.choices)}")
        return text


def _bool_from_text(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is not true or false")


def settings() -> list[Setting]:
    """Every flag, in the order of the groups."""
    found = []
    for group, cls in typing.get_type_hints(Config).items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            found.append(_setting(group, field, hints[field.name]))
    return found


def _setting(group: str, field: "dataclasses.Field[Any]", hint: Any) -> Setting:
    optional = many = False
    choices: tuple[str, ...] = ()
    if typing.get_origin(hint) is types.UnionType:
        optional = True
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        many = True
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is Literal:
        choices, hint = typing.get_args(hint), str
    assert hint in KIND_WORDS, f"{field.name}: no flag can have the type {hint}"
    return Setting(group, field.name, hint, choices, optional, many, field.default, field.metadata)


@dataclass(frozen=True)
class Spelling:
    """What one written name stands for. `inverted`: the name says the opposite of the field."""

    setting: Setting
    inverted: bool


def spellings(known: Sequence[Setting]) -> dict[str, Spelling]:
    """Every positive name; a file or a variable says no by its value."""
    table: dict[str, Spelling] = {}
    for setting in known:
        table |= {name: Spelling(setting, False) for name in setting.spellings}
        if setting.metadata["negates"] is not None:
            table[setting.metadata["negates"]] = Spelling(setting, True)
    return table
