"""Configurations of TRL, verl, ROLL and OpenRLHF, written as a tasks file and a run's configuration."""
