"""YAML mappings whose keys are unique: plain YAML lets the last of two equal keys win in silence."""

from pathlib import Path
from typing import Any

import yaml


class _UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"the key {key!r} is given twice")
        return super().construct_mapping(node, deep)


def load_mapping(path: Path) -> dict[Any, Any]:
    """The mapping a YAML file holds; an empty file is an empty one. Raises OSError, yaml.YAMLError, ValueError."""
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError("the file must hold a mapping from settings to values")
    return content
