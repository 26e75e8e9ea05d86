"""Compiles the core where that can be done; elsewhere the plain package is built, and a line says so.

Which modules: `[tool.speckv]` in `pyproject.toml`, which says everything else as well. SPECKV_CORE=plain leaves it out,
SPECKV_CORE=compiled takes no excuse. What was compiled is recorded for `sim/compiled.py`, which chooses at run time.
"""

from __future__ import annotations

import ast
import os
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import source_hash
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

ROOT = Path(__file__).resolve().parent
ASKED = os.environ.get("SPECKV_CORE") or None
LIBRARY = "sim._core"  # the one that all compiled modules are in is called sim._core__mypyc
PACKAGES = ("sim", "workloads")

# The compiled core must not depend on what else is installed: no library is looked at, not even its stubs. Types are
# checked by `make lint`.
MYPY = """\
[mypy]
follow_imports = skip
ignore_missing_imports = True
disable_error_code = var-annotated
[mypy-workloads.*,sim.models.*]
follow_imports = silent
[mypy-numpy.*,pandas.*,pyarrow.*,scipy.*,simpy.*]
follow_imports = skip
follow_imports_for_stubs = True
"""
# Where multiplying and adding is one instruction, plain Python would round differently.
FLAGS = ("-ffp-contract=off",)


class NotCompiled(Exception):
    """The reason why the core cannot be compiled."""


def sources() -> list[str]:
    """The modules to compile, as paths below the root with `/`."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["speckv"]["compiled"]
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern)) if path.name != "__init__.py"]
    return [path.relative_to(ROOT).as_posix() for path in found]


def read_by(modules: list[str]) -> list[str]:
    """Modules of ours that these import and that are not compiled: constants of theirs may be compiled in."""
    named: set[str] = set()
    for module in modules:
        for node in ast.walk(ast.parse((ROOT / module).read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
    paths = {name.replace(".", "/") + ".py" for name in named if name.split(".")[0] in PACKAGES}
    return sorted(path for path in paths - set(modules) if (ROOT / path).is_file())


def record(modules: list[str]) -> str:
    """What is compiled from what, line by line: a kind, a hash, a file."""

    def lines() -> Iterator[str]:
        """The last one says that it is the last."""
        yield f"recipe {digest('setup.py')} mypy-{version('mypy')}"
        for kind, paths in (("compiled", modules), ("read", read_by(modules))):
            for path in paths:
                yield f"{kind} {digest(path)} {path}"
        yield "end - -"

    def digest(path: str) -> str:
        return source_hash((ROOT / path).read_bytes()).hex()

    return "\n".join(lines()) + "\n"


class BuildCore(build_ext):
    """Compiles the core, or notes that it could not."""

    def run(self) -> None:
        modules = sources()
        try:
            version("mypy")
            if self.inplace and self._is_there(modules):
                return self._nothing()
            self._try_the_compiler()
            self._compile(modules)
        except PackageNotFoundError:
            self._leave_out("mypy is not installed")
        except NotCompiled as reason:
            self._leave_out(str(reason))
        except SystemExit:  # this is how mypyc ends after an error; it has printed it
            self._leave_out("mypyc found an error")
        except (CompileError, LinkError) as error:
            self._leave_out(f"{error}")

    def _is_there(self, modules: list[str]) -> bool:
        library = ROOT / self.get_ext_filename(f"{LIBRARY}__mypyc")
        built = [library, *(ROOT / self.get_ext_filename(module[:-3].replace("/", ".")) for module in modules)]
        recorded = library.with_name(library.name + ".txt")
        return all(map(Path.exists, [*built, recorded])) and recorded.read_text("utf-8") == record(modules)

    def _try_the_compiler(self) -> None:
        """Before anything that takes long: is there a compiler, and does it find Python's headers?"""
        from setuptools._distutils.ccompiler import new_compiler
        from setuptools._distutils.sysconfig import customize_compiler

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trial.c")
            file.write_text("#include <Python.h>\n")
            compiler = new_compiler()
            customize_compiler(compiler)
            try:
                compiler.compile([str(file)], output_dir=folder, include_dirs=self.include_dirs)
            except Exception as error:
                print(error, file=sys.stderr)
                raise NotCompiled("no C compiler that finds Python.h") from error

    def _compile(self, modules: list[str]) -> None:
        from mypyc.build import mypycify

        print(f"Compiling {len(modules)} modules of the core, a minute or so", file=sys.stderr)
        recorded = record(modules)  # of what is read now, not of what it will be then
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        config = Path(self.build_temp, "mypy.ini")
        config.write_text(MYPY)
        extensions = mypycify(
            ["--config-file", str(config), *modules],
            opt_level="3",
            debug_level="0",
            target_dir=self.build_temp,
            group_name=LIBRARY,
        )
        unix = os.name == "posix"
        for extension in extensions:  # a warning of a newer compiler is no reason to do without
            kept = [flag for flag in extension.extra_compile_args if flag != "-Werror"]
            extension.extra_compile_args = [*kept, *(FLAGS if unix else ())]
        self.distribution.ext_modules = self.extensions = extensions
        self.swig_opts = None  # or it cannot be finalized a second time
        self.finalize_options()
        for folder in (Path(self.build_lib), *((ROOT / "sim",) if self.inplace else ())):
            self._remove(folder)
        super().run()
        self._note(ROOT if self.inplace else Path(self.build_lib), recorded)

    def _leave_out(self, reason: str) -> None:
        reason = " ".join(reason.split())
        message = f"speckv: the core is not compiled, and will run slower: {reason}"
        if ASKED == "compiled":
            raise SystemExit(message)
        print(message, file=sys.stderr)
        self._nothing()
        self._remove(Path(self.build_lib))
        if self.inplace:
            self._note(ROOT, f"failed - {reason}\n")

    def _note(self, folder: Path, text: str) -> None:
        library = folder / self.get_ext_filename(f"{LIBRARY}__mypyc")
        library.with_name(library.name + ".txt").write_text(text, "utf-8")

    def _nothing(self) -> None:
        self.distribution.ext_modules = self.extensions = []

    def _remove(self, folder: Path) -> None:
        """Compiled modules of this Python, of which some may be of another time."""
        suffix = Path(self.get_ext_filename("any")).name.removeprefix("any")
        for file in [*folder.rglob(f"*{suffix}"), *folder.rglob(f"*{suffix}.txt")]:
            file.unlink()


class Wheel(bdist_wheel):
    """Builds before it says what the wheel is for: any platform if nothing was compiled."""

    def run(self) -> None:
        if not self.skip_build:
            self.run_command("build")
            self.skip_build = True
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()


if ASKED not in (None, "plain", "compiled"):
    raise SystemExit(f"SPECKV_CORE={ASKED!r}: no such core; allowed: plain, compiled, or not set")
setup(
    # Stands for those that mypyc makes once they are to be built.
    ext_modules=[] if ASKED == "plain" else [Extension(f"{LIBRARY}__mypyc", [])],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": Wheel},
)
