"""Install locked requirements into this interpreter's environment: with ``uv``, or with ``pip`` if uv cannot.

    python requirements/install.py requirements/demo.txt [MORE.txt ...] [--target DIR]

uv takes seconds where pip takes a minute or two. It does not read pip's configuration, so this script
hands it the indexes, wheel folders and certificate that pip is configured with. Only the locked packages
are installed and no dependency is resolved: nothing pulls in a CUDA package.
"""

import argparse
import ast
import os
import subprocess
import sys

UV = "uv==0.13.9"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
FLAGS = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links"}
"""Setting of pip -> the flag of uv that means the same."""


def pip_settings() -> dict[str, str]:
    """Return the settings of pip's files and environment; the environment overrides the files, as in pip."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    pairs = [line.split("=", 1) for line in listed.splitlines() if "=" in line]
    ordered = sorted(pairs, key=lambda pair: pair[0].startswith(":env:"))
    return {key.rpartition(".")[2]: str(ast.literal_eval(value)) for key, value in ordered}


def install_with_uv(what: list[str]) -> bool:
    """Return whether uv could be had and installed ``what``."""
    if subprocess.run([*PIP, "install", "-qq", UV]).returncode:
        return False
    settings = pip_settings()
    # pip takes the best version of all its places, uv by default the first place that has the package
    flags = ["--index-strategy", "unsafe-best-match"]
    for name, flag in FLAGS.items():
        for place in settings.get(name, "").split():
            flags += [flag, place]
    certificate = {"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {}
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--compile-bytecode"]
    command += ["--python", sys.executable]
    return subprocess.run([*command, *flags, *what], env={**certificate, **os.environ}).returncode == 0


def main() -> int:
    """Read the command line, install, return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="requirements with exact versions")
    parser.add_argument("--target", help="a folder instead of the environment")
    arguments = parser.parse_args()
    what = ["--no-deps", *(part for file in arguments.files for part in ("-r", file))]
    if arguments.target:
        what += ["--upgrade", "--target", arguments.target]
    if install_with_uv(what):
        return 0
    sys.stderr.write("note: uv could not install this; pip does now\n")
    return subprocess.run([*PIP, "install", "--quiet", *what]).returncode


if __name__ == "__main__":
    sys.exit(main())
