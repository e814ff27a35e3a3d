"""Imports point one way: server → engine → kernels; and the HTTP front never loads torch of its own."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "server": {"server", "engine", "configs"},
    "engine": {"engine", "kernels", "configs"},
    "kernels": {"kernels", "configs"},
}
OUTSIDE_ONLY = {"server": {"torch", "triton"}}


def imported(source: str) -> Iterator[str]:
    """Absolute names of all modules a file imports, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(root: Path) -> list[str]:
    found = []
    for part, allowed in MAY_IMPORT.items():
        for path in sorted((root / part).rglob("*.py")):
            for name in imported(path.read_text(encoding="utf-8")):
                package, _, rest = name.partition(".")
                target = rest.partition(".")[0]
                wrong_way = package == "loraplex" and target and target not in allowed
                if wrong_way or package in OUTSIDE_ONLY.get(part, ()):
                    found.append(f"{path.relative_to(root)} imports {name}")
    return found


def test_imports_point_one_way() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("part", "statement"),
    [
        ("kernels", "import loraplex.engine.batch"),
        ("kernels", "from loraplex import engine"),
        ("engine", "def f():\n    from loraplex.server.app import create_app"),
        ("server", "from loraplex.kernels.lora import weights"),
        ("server", "import torch"),
    ],
)
def test_a_planted_violation_is_seen(tmp_path: Path, part: str, statement: str) -> None:
    (tmp_path / part / "deep").mkdir(parents=True)
    (tmp_path / part / "deep" / "planted.py").write_text(statement)
    assert len(violations(tmp_path)) >= 1


def test_the_public_package_is_light_and_exports_what_it_says() -> None:
    """In a process of its own: this one has loaded everything."""
    script = (
        "import sys, loraplex\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'loraplex.server.offline.llm'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        "from loraplex import *\n"
        "assert set(loraplex.__all__) <= set(globals()) and loraplex.__version__\n"
        "assert LLM.__module__ == 'loraplex.server.offline.llm'\n"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=120)
