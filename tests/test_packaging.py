"""What is installed is what is in the tree, and nothing more."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ("server", "engine", "kernels")
PUBLIC = "server/public"
"""This folder is the package `loraplex` itself."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages_in_tree(root: Path) -> set[str]:
    """Every folder of code that holds a module; `configs` is data around one package."""
    folders = {path.parent for part in CODE for path in (root / part).rglob("*.py")}
    roots = {"loraplex", *(f"loraplex.{part}" for part in (*CODE, "configs"))}
    inner = folders - {root / PUBLIC}
    return roots | {"loraplex." + ".".join(folder.relative_to(root).parts) for folder in inner}


def test_every_folder_of_code_is_a_listed_package() -> None:
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert set(listed) == packages_in_tree(ROOT)
    assert len(listed) == len(set(listed))


def test_the_public_package_has_no_modules_of_its_own() -> None:
    """A module there would be two: `loraplex.x` and `loraplex.server.public.x`."""
    assert PROJECT["tool"]["setuptools"]["package-dir"]["loraplex"] == PUBLIC
    assert {path.name for path in (ROOT / PUBLIC).glob("*.*")} == {"__init__.py", "py.typed"}


def test_a_forgotten_folder_is_seen(tmp_path: Path) -> None:
    (tmp_path / "engine" / "new").mkdir(parents=True)
    (tmp_path / "engine" / "new" / "module.py").touch()
    assert "loraplex.engine.new" in packages_in_tree(tmp_path)


def test_no_root_folder_is_a_package_of_its_own() -> None:
    """A top-level `kernels` package would shadow the one that transformers imports from PyPI."""
    assert [part for part in CODE if (ROOT / part / "__init__.py").exists()] == []
    assert (ROOT / "configs" / "__init__.py").exists()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with a stand-in for the demo's weights."""
    copy = tmp_path_factory.mktemp("source")
    for part in (*CODE, "configs"):
        ignore = shutil.ignore_patterns("__pycache__", "demo")
        shutil.copytree(ROOT / part, copy / part, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    (copy / "configs" / "demo" / "base").mkdir(parents=True)
    (copy / "configs" / "demo" / "base" / "model.safetensors").write_bytes(b"weights")
    (copy / "configs" / "demo" / "train.py").touch()
    return copy


def build(source: Path, kind: str, out: Path) -> Path:
    """The wheel that `kind` of setuptools' build functions makes of `source`."""
    script = f"from setuptools import build_meta; build_meta.{kind}({str(out)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True, timeout=120)
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel."""
    with zipfile.ZipFile(build(source, "build_wheel", tmp_path_factory.mktemp("wheel"))) as archive:
        return set(archive.namelist())


def test_every_package_is_found_in_an_editable_installation(source: Path, tmp_path: Path) -> None:
    """There `loraplex` is one folder and `loraplex.server` another, which has no __init__.py."""
    with zipfile.ZipFile(build(source, "build_editable", tmp_path / "wheel")) as archive:
        archive.extractall(tmp_path / "site")
    listed = PROJECT["tool"]["setuptools"]["packages"]
    # Without `site`, and first, so that it is not this environment's own editable installation that is found.
    script = (
        "import importlib, site, sys\n"
        f"site.addsitedir({str(tmp_path / 'site')!r})\n"
        f"sys.path += {sorted({sysconfig.get_path('purelib'), sysconfig.get_path('platlib')})!r}\n"
        f"[importlib.import_module(name) for name in {listed!r}]\n"
        "import loraplex, loraplex.server.cli\n"
        "print(loraplex.__file__, loraplex.server.cli.__file__)\n"
    )
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-S", "-c", script], env=kept, check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [str(source / PUBLIC / "__init__.py"), str(source / "server" / "cli.py")]


def test_the_wheel_holds_all_code_and_no_weights(wheel: set[str]) -> None:
    paths = {path.relative_to(ROOT) for part in CODE for path in (ROOT / part).rglob("*.py")}
    modules = {f"loraplex/{str(path).removeprefix(PUBLIC + '/')}" for path in paths}
    assert modules <= wheel
    assert "loraplex/py.typed" in wheel
    assert {f"loraplex/{part}/py.typed" for part in (*CODE, "configs")} <= wheel
    assert "loraplex/configs/serve/demo.yaml" in wheel
    assert {name for name in wheel if "/demo/" in name or name.endswith(".safetensors")} == set()
    assert {name.partition("/")[0] for name in wheel} == {
        "loraplex",
        f"loraplex-{PROJECT['project']['version']}.dist-info",
    }


def test_the_wheel_holds_the_licence(wheel: set[str]) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_presets_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex.server.flags import parse

    monkeypatch.chdir(ROOT)
    presets = sorted((ROOT / "configs" / "serve").glob("*.yaml"))
    assert presets
    for preset in presets:
        assert parse(["--config", str(preset)], {}).model.served_names == ("demo",)
