"""The build step that pyproject.toml cannot describe: C libraries that are called through ctypes, for every Python.

An extension module has the name and the tag of one version of Python, these libraries have neither. Without a C
compiler they are left out, Pillow and torch do their work, and the wheel is a pure one.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LIBRARIES = {
    "kasoku.data.decode": ("_jpeg.c", "_pixels.c"),
    "kasoku.device": ("_conv.c", "_pointwise.c", "_winograd.c"),
    "kasoku.optim.lars": ("_lars.c",),
}
HEADERS = [str(path) for path in Path("src").rglob("*.h")]


class BuildLibrary(build_ext):
    """Names a library _native.so, whatever the version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"


class Wheel(bdist_wheel):
    """A wheel for every Python 3: of this system where the libraries were built, of any system where they were not."""

    def get_tag(self) -> tuple[str, str, str]:
        self.root_is_pure = not any(Path(self.bdist_dir).rglob("_native.so"))
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
    ext_modules=[
        Extension(
            f"{package}._native",
            [f"src/{package.replace('.', '/')}/{source}" for source in sources],
            libraries=["m", "dl"],
            depends=HEADERS,
            extra_compile_args=["-O3", "-fwrapv"],
            optional=True,
        )
        for package, sources in LIBRARIES.items()
    ],
)
