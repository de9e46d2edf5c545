"""Give each Python process that imports torch the fake devices: this folder is on its ``PYTHONPATH``."""

import importlib.util
import sys


class _Finder:
    """Loads the devices before torch and calls ``fake_cuda.begin`` after it."""

    is_asking = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.is_asking:
            return None
        self.is_asking = True
        spec = importlib.util.find_spec("torch")
        self.is_asking = False
        import fake_devices  # noqa: F401

        exec_module = spec.loader.exec_module

        def exec_and_begin(module):
            sys.meta_path.remove(self)
            exec_module(module)
            import fake_cuda

            fake_cuda.begin()

        spec.loader.exec_module = exec_and_begin
        return spec


sys.meta_path.insert(0, _Finder())
