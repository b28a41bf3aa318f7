"""Virtual environments that have torch and the other packages of this one, but not its kasoku."""

import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

LIMIT_S = 300


class CleanEnvironment:
    """A virtual environment in a folder.

    Packages are links to those of the running environment: to install torch anew takes minutes and gigabytes. `pip` is
    there too; it looks nowhere else for packages, and no compiler is on its path.
    """

    def __init__(self, folder: Path) -> None:
        self.bin, links = folder / "env" / "bin", folder / "packages"
        venv.create(folder / "env", with_pip=False)
        links.mkdir()
        for place in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
            for package in place.iterdir():
                if "kasoku" not in package.name and package.suffix != ".pth" and not (links / package.name).exists():
                    (links / package.name).symlink_to(package)
        own = next((folder / "env" / "lib").glob("python*/site-packages"))
        (own / "packages.pth").write_text(f"{links}\n")
        (self.bin / "pip").write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {self.bin / "python"} "$@"\n')
        (self.bin / "pip").chmod(0o755)

    def run(self, *words: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        """What a program of the environment prints; it must end well."""
        settings = {"PATH": str(self.bin), "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
        kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME") if name in os.environ}
        words = (self.bin / words[0], *words[1:])
        done = subprocess.run(
            words,
            cwd=cwd,
            env={**kept, **settings, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1", **(env or {})},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
