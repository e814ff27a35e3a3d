"""Settings from four sources: default < YAML file (`--config`) < `LORAPLEX_*` environment < command line.

The fields of `engine.config` are the only declaration of the flags; here they become argparse options, and the
sources one `Config`. A name works with dashes or underscores in every source. What is unknown, of the wrong type, or
contradicts itself is a `FlagError` that names the setting and where it came from.
"""

import argparse
import os
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from loraplex.engine.config import Config, LoRAConfig
from loraplex.server.setting_sources import (
    ENV_PREFIX,
    FlagError,
    Given,
    Values,
    from_mapping,
    read_environment,
    read_file,
    unknown,
)
from loraplex.server.settings import Setting, settings

COMMAND_LINE = "the command line"
KEYWORDS = "keyword arguments"


class _Store(argparse.Action):
    """Puts what an option says into the `Values` kept in the namespace."""

    def __init__(self, *args: Any, setting: Setting, meaning: dict[str, bool], **kwargs: Any) -> None:
        self.setting = setting
        self.meaning = meaning
        super().__init__(*args, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        try:
            if self.setting.kind is bool:
                value: Any = self.meaning[option_string]
            elif self.setting.many:
                value = self.setting.items_from_text(values if isinstance(values, list) else [values])
            else:
                value = self.setting.from_text(values)
        except ValueError as error:
            raise FlagError(f"{COMMAND_LINE}: {option_string}: {error}") from None
        namespace.values.put(self.setting, value, option_string)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(f"{COMMAND_LINE}: {message}")


def build_parser(prog: str = "loraplex serve") -> argparse.ArgumentParser:
    """The options, grouped, with a line of help each."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} MODEL_DIR [flags]",
        description="Serves a model folder, with LoRA adapters, over the OpenAI HTTP API.",
        epilog="Order: default < --config FILE < LORAPLEX_FLAG=value in the environment < command line. "
        "Underscores may stand for dashes. A list in a variable is separated by spaces and quoted as in a shell, or is "
        "JSON: LORAPLEX_LORA_PATHS='sql=/adapters/sql law=/adapters/law'.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of these settings, without the dashes")
    groups = {group: parser.add_argument_group(cls.__doc__) for group, cls in typing.get_type_hints(Config).items()}
    for setting in settings():
        _add_options(groups[setting.group], setting)
    return parser


def _add_options(group: Any, setting: Setting) -> None:
    shown, hidden = _options(setting)
    kwargs: dict[str, Any] = {"action": _Store, "setting": setting, "default": argparse.SUPPRESS}
    kwargs["dest"] = setting.field
    kwargs["meaning"] = shown | hidden
    if setting.kind is bool:
        kwargs["nargs"] = 0
    else:
        kwargs["nargs"] = "+" if setting.many and not setting.metadata["repeat"] else None
        kwargs["metavar"] = _metavar(setting)
    group.add_argument(*shown, help=_help(setting, hidden), **kwargs)
    if hidden:
        group.add_argument(*hidden, help=argparse.SUPPRESS, **kwargs)


def _options(setting: Setting) -> tuple[dict[str, bool], dict[str, bool]]:
    """Option strings that --help lists, and those it only mentions; each with what it says of a boolean."""
    if setting.kind is not bool:
        return {f"--{setting.name}": True}, {f"--{alias}": True for alias in setting.metadata["aliases"]}
    shown = {f"--{setting.name}": True, f"--no-{setting.name}": False}
    negates = setting.metadata["negates"]
    hidden = {} if negates is None else {f"--{negates}": False, f"--no-{negates}": True}
    return shown, hidden


def _option_names() -> list[str]:
    return ["--config", *(name for setting in settings() for part in _options(setting) for name in part)]


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "{" + ",".join(setting.choices) + "}"
    return setting.metadata["metavar"] or {int: "N", float: "X", str: "TEXT"}[setting.kind]


def _help(setting: Setting, hidden: Mapping[str, bool]) -> str:
    text = setting.metadata["help"]
    if setting.field == "model_path":
        text += " (required; or given as MODEL_DIR)"
    elif "(default" not in text:
        text += f" (default: {_default_words(setting.default)})"
    if setting.metadata["negates"] is not None:
        text += f" [the opposite: --{setting.metadata['negates']}]"
    elif hidden:
        text += f" [also {', '.join(hidden)}]"
    return text.replace("%", "%%")


def _default_words(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default in (None, ()) else str(default)


def read_command_line(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[dict[str, Given], str | None]:
    """Settings of the command line, and the file that --config names."""
    namespace = argparse.Namespace(values=Values(COMMAND_LINE))
    namespace, rest = parser.parse_known_args([_dashed(arg) for arg in argv], namespace)
    table = {setting.name: setting for setting in settings()}
    for arg in rest:
        if arg.startswith("-"):
            unknown(COMMAND_LINE, arg.partition("=")[0], [name[2:] for name in _option_names()])
    if len(rest) > 1:
        raise FlagError(f"{COMMAND_LINE}: one MODEL_DIR is expected, not {' '.join(rest)}")
    for arg in rest:
        namespace.values.put(table["model-path"], arg, arg)
    return namespace.values.given, namespace.config


def _dashed(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None, prog: str = "loraplex serve") -> Config:
    """The configuration the four sources make together. Raises FlagError; `--help` prints and exits."""
    environ = os.environ if environ is None else environ
    known = settings()
    from_argv, config_file = read_command_line(argv, build_parser(prog))
    config_file = config_file or environ.get(f"{ENV_PREFIX}CONFIG") or None
    from_file = read_file(config_file, known) if config_file else {}
    given = from_file | read_environment(environ, known) | from_argv
    if not given.get("model_path", Given("", "", "")).value:
        raise FlagError("MODEL_DIR is missing: give the folder of the model first, or --model-path")
    for setting in known:
        if setting.field in given and given[setting.field].source == config_file:
            _check_relative_paths(setting, given[setting.field])
    _lower_batch_default(given)
    try:
        return _build(known, given)
    except ValueError as error:
        raise FlagError(f"{error}{_sources(str(error), given)}") from None


def from_keywords(keywords: Mapping[str, Any]) -> Config:
    """The configuration of Python keyword arguments named like flags, with underscores. Neither a file nor the
    environment is read. Raises FlagError."""
    known = settings()
    given = from_mapping(keywords, known, KEYWORDS)
    _lower_batch_default(given)
    try:
        return _build(known, given)
    except ValueError as error:
        raise FlagError(str(error)) from None


def _check_relative_paths(setting: Setting, given: Given) -> None:
    """Whoever writes a path into a file may expect it to be relative to that file: the error says what it is not."""
    if setting.metadata["metavar"] not in ("DIR", "FILE", "NAME=PATH"):
        return
    for text in given.value if setting.many else [given.value]:
        path = text.partition("=")[2] if setting.metadata["metavar"] == "NAME=PATH" else text
        if path and not path.startswith(("/", "dummy:")) and not os.path.exists(path):
            raise FlagError(
                f"{given.source}: {given.written}: {path} does not exist; it is taken relative to {os.getcwd()}"
            )


def _lower_batch_default(given: dict[str, Given]) -> None:
    """No more adapters run in a step than may be loaded; only who names both numbers can contradict himself."""
    loaded = given.get("max_loaded_loras")
    if loaded is None or loaded.value is None or "max_loras_per_batch" in given:
        return
    if loaded.value < LoRAConfig.max_loras_per_batch:
        given["max_loras_per_batch"] = loaded


def _build(known: list[Setting], given: Mapping[str, Given]) -> Config:
    groups = {}
    for group, cls in typing.get_type_hints(Config).items():
        names = [setting.field for setting in known if setting.group == group]
        groups[group] = cls(**{name: given[name].value for name in names if name in given})
    return Config(**groups)


def _sources(message: str, given: Mapping[str, Given]) -> str:
    """Where the flags that an error names were set, when it was not all on the command line."""
    named = [name.removeprefix("no-").replace("-", "_") for name in re.findall(r"--([a-z-]+)", message)]
    origins = {name: given[name] for name in named if name in given}
    if all(origin.source == COMMAND_LINE for origin in origins.values()):
        return ""
    return " (" + "; ".join(f"{origin.written} in {origin.source}" for origin in origins.values()) + ")"
