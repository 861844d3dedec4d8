"""How an editable installation finds the package: by a folder on the path, which type checkers find too.

Left to itself, setuptools maps each package to its folder by an import hook, because they lie in four places.
Checkers do not run that hook, and report a package without types. The folder `editable` has nothing but a
link to the package, so that `tests` and the other folders beside it do not become packages of their own.

Where links were lost, as in some ZIP archives, the hook is what there is.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

LINKED = Path(__file__).parent / "editable" / "cudnn_actor" / "protocol" / "__init__.py"


class EditableWheel(editable_wheel):
    """An editable installation, of one folder if all links are links."""

    def finalize_options(self) -> None:
        """Say where the packages lie."""
        if LINKED.exists():
            self.distribution.package_dir = {"": "editable"}
        super().finalize_options()


setup(cmdclass={"editable_wheel": EditableWheel})
