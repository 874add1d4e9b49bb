"""`python inherit.py ENVIRONMENT WHEEL`: an isolated environment that uses the packages of this interpreter.

A virtual environment made from another one sees only the packages of the base interpreter, so the folders are listed
one by one. Our wheel holds only Python: it is unpacked, without an index, a network or pip.
"""

from __future__ import annotations

import os
import shlex
import site
import sys
import venv
import zipfile
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path

PTH = "zz_inherited.pth"  # sorted last: the environment's own packages come first
SCRIPT = """#!/bin/sh
'''exec' {python} "$0" "$@"
' '''
import sys
from {module} import {name}
sys.exit({name}())
"""


def main() -> None:
    environment, wheel = Path(sys.argv[1]).absolute(), Path(sys.argv[2])
    own_folder = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    inherited = [p for p in [*site.getsitepackages(), *own_folder] if os.path.isdir(p)]
    venv.EnvBuilder(symlinks=True).create(environment)
    own = environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (own / PTH).write_text("".join(f"import site; site.addsitedir({p!r})\n" for p in inherited))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(own)
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt"))
        entries = ConfigParser(delimiters=("=",))
        entries.read_string(archive.read(name).decode())
    commands = dict(entries["console_scripts"]) if entries.has_section("console_scripts") else {}
    if find_spec("pip"):
        commands["pip"] = "pip._internal.cli.main:main"
    for command, what in commands.items():
        module, _, function = what.partition(":")
        path = environment / "bin" / command
        python = shlex.quote(str(environment / "bin" / "python"))
        path.write_text(SCRIPT.format(python=python, module=module, name=function))
        path.chmod(0o755)


if __name__ == "__main__":
    main()
