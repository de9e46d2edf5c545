"""Compile and load ``devices.cpp``: before torch is imported, because torch looks for CUDA once."""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path


def compiled() -> Path:
    """Return the compiled file; it is compiled once for a version of torch."""
    source = Path(__file__).with_name("devices.cpp")
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    key = hashlib.sha256(source.read_bytes() + (torch_folder / "version.py").read_bytes()).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"fake_cuda_{os.getuid()}_{key}.so"
    if not made.exists():
        part, libraries = made.with_suffix(f".{os.getpid()}"), str(torch_folder / "lib")
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(source)]
        command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", "-o", str(part)]
        subprocess.run(command, check=True)
        part.rename(made)
    return made


library = ctypes.CDLL(str(compiled()))
