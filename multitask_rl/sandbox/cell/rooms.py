"""Rooms: roots for programs that share one mount namespace, each with an empty /tmp of its own.

A room is a copy of the cell's root; ``chroot`` confines a program to it. Each program gets an empty file
system, mounted over the last one on the room's /tmp. The room is taken down after a number of programs, or at
once when a program left something. A program has no right to mount, unmount or change its root.
A mount namespace per program would do as well, but its end waits 0.4 ms for an RCU grace period.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

from . import linux

_PLACE = b"/tmp"
_MOST_PROGRAMS, _MOST_OPTIONS = 32, 256
_BLOCKS_AND_FILES = struct.Struct("=16x5Q")
"""Fields of ``struct statfs``, which has 120 bytes."""


class Room:
    """One root with a /tmp, used by one program at a time."""

    def __init__(self, path: bytes) -> None:
        self.path = path
        self.tmp = path + _PLACE
        self.num_programs = 0
        """Programs since the room was built; 0 = it is not built."""
        self.answer = ctypes.create_string_buffer(120)
        self.ask = linux.prepare_call(linux.NR_STATFS, self.tmp, self.answer)
        self.mounts: dict[bytes, tuple[Any, ...]] = {}
        """Prepared mounts on /tmp, by their options."""
        self.calls = (linux.prepare_call(linux.NR_CHROOT, path), linux.prepare_call(linux.NR_CHDIR, _PLACE))
        """System calls by which a process enters."""

    def take_down(self) -> None:
        """Remove the room, with every file system in it."""
        if self.num_programs:
            linux.umount(self.path)
            self.num_programs = 0


class Rooms:
    """The rooms of one mount namespace, for the one process that may mount there."""

    def __init__(self) -> None:
        self._free: list[Room] = []
        self._number = 0

    def take(self, options: bytes) -> Room:
        """Return an unused room with an empty /tmp, mounted with ``options``, else ``OSError``."""
        if self._free:
            room = self._free.pop()
        else:
            if not self._number:
                flags = linux.MS_NOSUID | linux.MS_NODEV
                linux.mount(b"tmpfs", _PLACE, b"tmpfs", flags, b"mode=0755,size=64k")
                linux.mount(b"none", _PLACE, None, linux.MS_UNBINDABLE)  # no room holds a copy of the others
            path = b"%s/%d" % (_PLACE, self._number)
            os.mkdir(path)
            self._number += 1
            room = Room(path)
        try:
            if not room.num_programs:
                linux.mount(b"/", room.path, None, linux.MS_BIND | linux.MS_REC)
            room.num_programs += 1
            mount = room.mounts.get(options)
            if mount is None:
                if len(room.mounts) > _MOST_OPTIONS:
                    room.mounts.clear()
                flags = linux.MS_NOSUID | linux.MS_NODEV
                mount = linux.prepare_call(linux.NR_MOUNT, b"tmpfs", room.tmp, b"tmpfs", flags, options)
                room.mounts[options] = mount
            if linux.raw_syscall(*mount) == -1:
                linux.raise_errno("mount")
        except OSError:
            self.give_back(room)
            raise
        return room

    def give_back(self, room: Room) -> None:
        """Take ``room`` back after its program ended; a room that holds files is taken down first."""
        is_empty = False
        if room.num_programs < _MOST_PROGRAMS and linux.raw_syscall(*room.ask) == 0:
            blocks, free, _, files, free_files = _BLOCKS_AND_FILES.unpack_from(room.answer)
            is_empty = blocks == free and files == free_files + 1
        if not is_empty:
            room.take_down()
        self._free.append(room)

    def clear(self) -> None:
        """Take down the rooms without a program."""
        for room in self._free:
            room.take_down()
