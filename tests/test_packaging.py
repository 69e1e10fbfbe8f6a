"""Files in packaging/ match setup.cfg, and installed tools can read them."""

import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import hpc3d

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
PACKAGING = ROOT / "packaging"
EXTRAS = "parquet", "exact", "tensorboard"
CONDA_NAMES = {"matplotlib": "matplotlib-base"}


@pytest.fixture(scope="module")
def setup():
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def bounds(text):
    """Return {package: its lower bound} of lines `package>=bound`."""
    return {name.lower(): bound for name, bound in re.findall(r"^(\w+)\s*>=(\S+)$", text, re.M)}


def required(setup):
    return bounds(setup["options"]["install_requires"])


def optional(setup):
    """Return {extra: {package: bound}} of the extras in the recipes."""
    return {extra: bounds(setup["options.extras_require"][extra]) for extra in EXTRAS}


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("CITATION.cff", r"^version: (.+)$"),
        ("packaging/hpc3d.def", r"VERSION=(.+)$"),
        ("packaging/recipe.yaml", r'^  version: "(.+)"$'),
        ("packaging/modulefile", r"/opt/hpc3d/(.+)$"),
        ("packaging/spack_repo/hpc3d/packages/py_hpc3d/package.py", r'version\("(.+)"'),
        ("docs/clusters.md", r"hpc3d@([\d.]+\d)"),
    ],
)
def test_versions_match_the_package(path, pattern):
    found = re.findall(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert {*found} == {hpc3d.__version__}


class Spack:
    """Fake of Spack's functions in package.py; stores {(package, variant): (bound, types)}."""

    def __init__(self):
        self.needs, self.variants, self.context = {}, set(), {}

    @contextmanager
    def default_args(self, **words):
        before, self.context = self.context, {**self.context, **words}
        yield
        self.context = before

    def when(self, variant):
        return self.default_args(when=variant)

    def depends_on(self, spec, **words):
        package, _, bound = spec.partition("@")
        words = {**self.context, **words}
        self.needs[package, words.get("when", "")] = bound, words["type"]

    def variant(self, name, **words):
        assert words["description"] and words["default"] is False
        self.variants.add(name)

    def modules(self):
        """Fake modules that package.py imports."""
        build, package = ModuleType("python"), ModuleType("package")
        build.PythonPackage = object
        for name in ("default_args", "depends_on", "variant", "when"):
            setattr(package, name, getattr(self, name))
        package.license = package.version = lambda *words: None
        return {"spack_repo.builtin.build_systems.python": build, "spack.package": package}


def test_spack_requirements_match_setup_cfg(setup, monkeypatch):
    repository = PACKAGING / "spack_repo" / "hpc3d"
    assert yaml.safe_load((repository / "repo.yaml").read_text())["repo"]["namespace"] == "hpc3d"
    spack = Spack()
    for name, module in spack.modules().items():
        for depth in range(1, name.count(".") + 1):
            parent = ".".join(name.split(".")[:depth])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    path = repository / "packages" / "py_hpc3d" / "package.py"
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), {"__name__": "package"})

    def specs(packages):
        return {f"py-{name}".replace("_", "-"): f"{bound}:" for name, bound in packages.items()}

    python = setup["options"]["python_requires"].removeprefix(">=")
    wanted = {("python", ""): f"{python}:", ("py-setuptools", ""): "68:"}
    wanted |= {(name, ""): bound for name, bound in specs(required(setup)).items()}
    for extra, packages in optional(setup).items():
        wanted |= {(name, f"+{extra}"): bound for name, bound in specs(packages).items()}
    assert {need: bound for need, (bound, _) in spack.needs.items()} == wanted
    assert spack.variants == {*EXTRAS}
    assert all(
        "run" in types or name == "py-setuptools" for (name, _), (_, types) in spack.needs.items()
    )


def test_conda_requirements_match_setup_cfg(setup):
    recipe = yaml.safe_load((PACKAGING / "recipe.yaml").read_text(encoding="utf-8"))
    needs = {kind: bounds_of_conda(lines) for kind, lines in recipe["requirements"].items()}
    python = {"python": setup["options"]["python_requires"].removeprefix(">=")}
    assert needs["run"] == {
        CONDA_NAMES.get(name, name): bound for name, bound in (required(setup) | python).items()
    }
    assert needs["run_constraints"] == {
        name: bound for packages in optional(setup).values() for name, bound in packages.items()
    }
    assert needs["host"].items() >= python.items()
    (script,) = recipe["build"]["python"]["entry_points"]
    assert script == setup["options.entry_points"]["console_scripts"].strip()


def bounds_of_conda(lines):
    return {name: bound for name, _, bound in (line.partition(" >=") for line in lines)}


@pytest.mark.parametrize("name", ["Dockerfile", "hpc3d.def"])
def test_containers_install_existing_extras(name, setup):
    text = (PACKAGING / name).read_text(encoding="utf-8")
    (extras,) = re.findall(r"whl\)\[(.+)\]", text)
    assert {*extras.split(",")} <= {*setup["options.extras_require"]}
    assert "mpi" in {*extras.split(",")}
    assert "pip wheel --no-deps -w dist ." in text  # which makes what they copy
    if name == "Dockerfile" and shutil.which("hadolint"):
        subprocess.run(["hadolint", PACKAGING / name], check=True)


# The commands that a module file calls, and what is_loaded answers.
TCL = """
proc module-whatis args {}
proc conflict args {}
proc is-loaded name { return 0 }
foreach word {module prepend-path setenv} { proc $word args "puts \\"$word \\$args\\"" }
foreach once 1 { source FILE; ModulesHelp }
"""


@pytest.mark.skipif(not shutil.which("tclsh"), reason="no tclsh")
@pytest.mark.parametrize("there", [True, False])
def test_module_file_finds_an_environment(there, tmp_path):
    program = tmp_path / "bin" / "hpc3d"
    program.parent.mkdir()
    program.touch(0o755 if there else 0o644)
    text = (PACKAGING / "modulefile").read_text(encoding="utf-8")
    assert text.startswith("#%Module") and text.count("# SITE") == 2
    (tmp_path / "file").write_text(
        re.sub(r"^set prefix .*", f"set prefix {tmp_path}", text, flags=re.M)
    )
    done = subprocess.run(
        ["tclsh"],
        input=TCL.replace("FILE", str(tmp_path / "file")),
        capture_output=True,
        text=True,
        check=True,
    )
    if there:
        said = ["module load openmpi", f"prepend-path PATH {tmp_path}/bin"]
        assert done.stdout.splitlines() == [*said, f"setenv VIRTUAL_ENV {tmp_path}"]
        assert "hpc3d init FOLDER" in done.stderr
    else:
        assert not done.stdout and "correct prefix in the module file" in done.stderr


@pytest.mark.parametrize(
    ("beside", "package"), [("pyvenv.cfg", ".[mpi]"), ("conda-meta", ".[mpi]"), ("lib", ".")]
)
def test_make_setup_installs_an_mpi_unless_the_system_has_one(beside, package, tmp_path):
    """The library of an mpirun in another Python environment is not loaded."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").touch(0o755)
    (tmp_path / beside).touch()
    make = ["make", "-n", "-B", ".venv/setup.stamp"]
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    said = subprocess.check_output(make, cwd=ROOT, text=True, env=os.environ | path)
    assert re.search(rf" -e '{re.escape(package)}'$", said, re.M)


def test_make_test_mpi_uses_the_given_launcher():
    make = ["make", "-n", "test-mpi", "NP=4", "LAUNCH=srun --mpi=pmix"]
    said = subprocess.check_output(make, cwd=ROOT, text=True)
    assert re.search(
        r"^srun --mpi=pmix -n 4 python -m pytest --with-mpi --ranks 4 .*tests/with_mpi$",
        said,
        re.M,
    )


@pytest.mark.slow
def test_unjoined_ranks_are_reported():
    alone = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--with-mpi"]
    done = subprocess.run(
        [*alone, "--ranks", "4", "tests/with_mpi"],
        capture_output=True,
        cwd=ROOT,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 4
    assert "4 ranks were started, but MPI sees 1" in done.stderr
