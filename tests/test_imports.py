"""Who may import whom, and that the core lives without jax."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT_JAX = """
import sys
for name in ("jax", "jaxlib", "flax"):
    sys.modules[name] = None  # importing it raises ImportError
import importlib, pkgutil
import jaxkv
names = ["jaxkv"] + [
    module.name
    for module in pkgutil.walk_packages(jaxkv.__path__, "jaxkv.")
    if not module.name.startswith("jaxkv.engine.")
]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def imported_roots(path: Path) -> set[str]:
    """The dotted names that a file imports, wherever in it the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def offenders(folder: str, forbidden: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    """Files under `folder` that import one of `forbidden` (packages, with all below), but for `allowed`."""

    def under(name: str, package: str) -> bool:
        return name == package or name.startswith(package + ".")

    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in sorted(imported_roots(path))
        if any(under(name, package) for package in forbidden)
        and not any(under(name, package) or under(package, name) for package in allowed)
    ]


def test_every_module_of_the_core_imports_where_jax_cannot_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


@pytest.mark.parametrize(
    ("folder", "forbidden", "allowed"),
    [
        ("pallas_kernels", ("jaxkv", "models", "flax"), ()),
        ("models", ("jaxkv",), ("jaxkv.specs",)),
    ],
)
def test_arrows_point_one_way(folder: str, forbidden: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    assert offenders(folder, forbidden, allowed) == []


def test_only_the_engine_and_the_command_line_import_models_and_kernels() -> None:
    found = offenders("jaxkv", ("models", "pallas_kernels", "jax", "flax"))
    assert [line for line in found if not line.startswith(("jaxkv/engine/", "jaxkv/commands/"))] == []


def test_the_check_itself_sees_a_forbidden_import() -> None:
    assert offenders("jaxkv/engine", ("jax",)) != []
