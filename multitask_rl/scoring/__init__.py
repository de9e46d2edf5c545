"""The path of a reward: ``RewardPool`` (``pool.py``) scores rollouts and judges constraints.

A ``Round`` makes an ``Item`` per rollout and plugin. The plugin's ``Lane`` groups items into a ``Call``. A
``Runner`` sends it to a ``WorkerProcess``, or makes it in this process. There a ``Grader`` asks the plugin
and turns each answer into a typed result.
"""
