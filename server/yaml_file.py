"""YAML mappings whose keys are unique: plain YAML lets the last of two equal keys win in silence."""

from pathlib import Path
from typing import Any

import yaml


class _UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                mark = node.value[i][0].start_mark
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is given twice", problem_mark=mark)
        return super().construct_mapping(node, deep)


def load_mapping(path: Path) -> dict[Any, Any]:
    """The mapping a YAML file holds; an empty file is an empty one. Raises OSError, yaml.YAMLError, ValueError."""
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError("the file must hold a mapping from settings to values")
    return content


def yaml_complaint(error: Exception) -> str:
    """What `load_mapping` raised, in one line: the line of the file and the reason."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())
