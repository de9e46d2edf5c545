"""Compile and load ``devices.cpp``: before torch is imported, because torch looks for CUDA once."""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path


def compiled() -> Path:
    """Return the compiled file; it is compiled once for an installed torch, whose folder it names."""
    source = Path(__file__).with_name("devices.cpp")
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    parts = [source.read_bytes(), (torch_folder / "version.py").read_bytes(), os.fsencode(torch_folder)]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"fake_cuda_{os.getuid()}_{key}.so"
    if not made.exists():
        part, libraries = made.with_suffix(f".{os.getpid()}"), str(torch_folder / "lib")
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(source)]
        command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", "-o", str(part)]
        subprocess.run(command, check=True)
        part.rename(made)
    return made


library = ctypes.CDLL(str(compiled()))
