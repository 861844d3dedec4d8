"""What pyproject.toml cannot say: how an editable installation finds the package, and a minimal installation.

An editable installation finds the package by a folder on the path, which type checkers find too.

Left to itself, setuptools maps each package to its folder by an import hook, because they lie in four places.
Checkers do not run that hook, and report a package without types. The folder `editable` has nothing but
links to the package and to the pytest plugin, so that `tests` and the other folders beside it do not become
packages of their own.

Where links were lost, as in some ZIP archives, the hook is what there is.

A minimal installation, `CUDNN_ACTOR_MINIMAL=1 pip install .`, leaves out the commands `chaos` and `bench`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

LINKED = Path(__file__).parent / "editable" / "cudnn_actor" / "protocol" / "__init__.py"


class EditableWheel(editable_wheel):
    """An editable installation, of one folder if all links are links."""

    def finalize_options(self) -> None:
        """Say where the packages lie."""
        if LINKED.exists():
            self.distribution.package_dir = {"": "editable"}
        super().finalize_options()


class BuildPackages(build_py):
    """The packages, without those that a minimal installation leaves out, and nothing of an earlier build."""

    def finalize_options(self) -> None:
        """Choose the packages."""
        super().finalize_options()
        if os.environ.get("CUDNN_ACTOR_MINIMAL"):
            self.packages = [name for name in self.packages if not name.startswith("cudnn_actor.trials")]

    def run(self) -> None:
        """Build them in an empty folder: whatever lies in it goes into the wheel.

        An editable installation builds in the folders of the source, which stay.
        """
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "cudnn_actor"), ignore_errors=True)
        super().run()


setup(cmdclass={"editable_wheel": EditableWheel, "build_py": BuildPackages})
