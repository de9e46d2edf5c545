"""Configurations of TRL, verl, ROLL and OpenRLHF, written as a tasks file and a run's configuration.

Read ``conversion`` first (what every conversion does), then one source, from its table at the file's end.
``shell`` and ``script`` read files without running them; ``messages`` has the texts.
"""
