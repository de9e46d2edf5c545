"""Configurations of TRL, verl and OpenRLHF, read and written as a tasks file and a run's configuration."""
