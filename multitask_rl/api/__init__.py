"""Python front doors: classes that start runs, or serve training loops of one's own, from Python objects.

Each is a short way into what exists elsewhere (trainer, engines, prefill, packing); nothing else lives here.
``docs/reference.md`` lists them.
"""
