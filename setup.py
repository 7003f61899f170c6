"""Builds the extensions. Each fabric's extension is optional: built where its headers are there,
reported as left out where they are not. Everything else is in pyproject.toml."""

import os
import sys
import tempfile

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FLAGS = ["-O3", "-fno-strict-aliasing", "-pthread", "-Wno-unused-function", "-Wno-unused-variable"]
FLAGS += os.environ.get("FABRICX_CFLAGS", "").split()
LINK = ["-pthread", *os.environ.get("FABRICX_LDFLAGS", "").split()]

#: extension -> (source, headers it cannot do without, Debian package that brings them)
EXTENSIONS = {
    "fabricx._worker": ("pyx/worker.pyx", [], ""),
    "fabricx._watcher": ("pyx/watcher.pyx", [], ""),
    "fabricx._null": ("pyx/null.pyx", [], ""),
    "fabricx._local": ("pyx/local.pyx", [], ""),
    "fabricx._ref": ("pyx/ref.pyx", [], ""),
    "fabricx._drive": ("pyx/drive.pyx", [], ""),
    "fabricx._ofi": ("pyx/ofi.pyx", ["rdma/fabric.h"], "libfabric-dev"),
    "fabricx._verbs": ("pyx/verbs.pyx", ["infiniband/verbs.h"], "libibverbs-dev"),
}


class BuildExt(build_ext):
    """Leaves out an extension whose headers are missing, and says so."""

    def has(self, headers):
        with tempfile.TemporaryDirectory() as d:
            path = os.path.join(d, "probe.c")
            with open(path, "w") as f:
                f.writelines(f"#include <{h}>\n" for h in headers)
            try:
                self.compiler.compile([path], output_dir=d, include_dirs=self.include_dirs)
            except CompileError:
                return False
        return True

    def build_extensions(self):
        kept = []
        for ext in self.extensions:
            headers, package = EXTENSIONS[ext.name][1:]
            if headers and not self.has(headers):
                print(f"fabricx: {ext.name} left out: no <{'>, <'.join(headers)}> (Debian: {package})", file=sys.stderr)
            else:
                kept.append(ext)
        self.extensions = kept
        super().build_extensions()


def extensions():
    only = os.environ.get("FABRICX_ONLY", "").split(",")  # for development: FABRICX_ONLY=_local,_drive
    depends = [os.path.join("pyx", f) for f in sorted(os.listdir("pyx")) if f.endswith((".pxd", ".pxi", ".h"))]
    return [
        Extension(name, [source], include_dirs=["pyx"], depends=depends, extra_compile_args=FLAGS, extra_link_args=LINK)
        for name, (source, _, _) in EXTENSIONS.items()
        if os.path.exists(source) and (only == [""] or name.rpartition(".")[2] in only)
    ]


setup(
    ext_modules=cythonize(
        extensions(),
        include_path=["pyx"],
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": False,
        },
    ),
    cmdclass={"build_ext": BuildExt},
)
