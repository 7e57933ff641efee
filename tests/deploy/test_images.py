"""Images: a router without torch, every version pinned, nobody is root.

No image is built here; what a router's image would hold is played by hiding everything else.
"""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGES = ROOT / "deploy" / "images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DEPENDENCIES = [Requirement(each) for each in PROJECT["dependencies"]]
OPTIONAL = [Requirement(each) for each in PROJECT["optional-dependencies"]["ray"]]
NO_ROUTER_NEEDS = {"torch", "safetensors", "xxhash"}

OPENS_A_MODEL = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

model, *hidden = sys.argv[1:]
sys.meta_path.insert(0, Absent())
from services.cli.main import run
from services.router.app import Router
from services.router.served_model import ServedModel
from services.runtime.settings import RouterConfig

assert run(["router", "--help"]) == 0
Router(RouterConfig(model), ServedModel.open(model), "token")
import services.launch.service
assert "torch" not in sys.modules
"""


def lines(name: str) -> list[str]:
    text = (IMAGES / name).read_text("utf-8").splitlines()
    return [line for line in text if line and not line.startswith("#")]


def closure(names: Iterable[str | Requirement]) -> set[str]:
    """Distributions that these need here, themselves included."""
    todo = [Requirement(str(each)) for each in names]
    found: set[str] = set()
    while todo:
        need = todo.pop()
        extras = ["", *need.extras]
        for text in importlib.metadata.requires(need.name) or ():
            further = Requirement(text)
            wanted = further.marker is None or any(
                further.marker.evaluate({"extra": extra}) for extra in extras
            )
            if wanted and canonicalize_name(further.name) not in found:
                todo.append(further)
        found.add(canonicalize_name(need.name))
    return found


def test_a_router_opens_a_model_with_what_its_image_holds(tmp_path: Path) -> None:
    tiny_model = make_tiny_model(tmp_path / "tiny")
    held = closure(lines("router.txt"))
    assert not NO_ROUTER_NEEDS & held
    hidden = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & {*held, "kvrelay"}
    }
    assert "torch" in hidden
    done = subprocess.run(
        [sys.executable, "-c", OPENS_A_MODEL, str(tiny_model), *sorted(hidden)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_router_needs_what_the_project_needs_but_for_instances() -> None:
    needed = {each.name for each in DEPENDENCIES}
    assert set(lines("router.txt")) == needed - NO_ROUTER_NEEDS


def test_every_version_is_pinned_as_the_project_allows() -> None:
    pins = dict(line.split("==") for line in lines("constraints.txt"))
    needed = closure([*DEPENDENCIES, *OPTIONAL])
    assert needed <= pins.keys() | {"setuptools"}, "add them to constraints.txt"
    for each in [*DEPENDENCIES, *OPTIONAL]:
        assert each.specifier.contains(pins[canonicalize_name(each.name)]), each


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_are_staged_pinned_and_without_root(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(re.findall(r"^FROM \$\{BASE\}", text, re.MULTILINE)) == 2
    (base,) = re.findall(r"^ARG BASE=(\S+)", text, re.MULTILINE)
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-bookworm", base)
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE) == ["10001:10001"]
    joined = text.replace("\\\n", " ")
    for install in re.findall(r"pip install[^&\n]*", joined):
        if "--no-deps --no-build-isolation ." not in install and install in _commands(joined):
            assert "-c constraints.txt" in install, install
    for copied in re.findall(r"^COPY (?!--from)(.*)", text, re.MULTILINE):
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists(), source


def _commands(dockerfile: str) -> str:
    """The RUN instructions: comments and COPY left out."""
    return "\n".join(line for line in dockerfile.splitlines() if line.startswith("RUN"))


def test_images_are_those_that_the_chart_and_compose_ask_for() -> None:
    assert [path.name for path in DOCKERFILES] == ["router.Dockerfile", "worker.Dockerfile"]
    built = {
        tag
        for path in DOCKERFILES
        for tag in re.findall(r"-t (kvrelay-\w+:\S+)", path.read_text("utf-8"))
    }
    chart = ROOT / "deploy" / "helm" / "kvrelay"
    asked = {
        tag
        for name in ("values.yaml", "values-gpu.yaml")
        for tag in re.findall(r"image: (\S+)", (chart / name).read_text("utf-8"))
    }
    assert asked == built
