"""Rooms: roots for programs that share one mount namespace, each with an empty /tmp of its own.

A mount namespace for each program would do as well, but to end one the kernel waits for an RCU grace period:
0.4 ms in which the worker idles. Here one wait serves many programs. A room is a copy of the cell's root to
which a program is confined by ``chroot``; an empty file system is mounted over the last one on its /tmp, and
the whole room is taken down after a number of programs, or at once when a program left something behind.
A program sees the topmost file system only, and has no right to mount, unmount or change its root.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from . import linux

__all__ = ["Room", "Rooms"]

_PLACE = b"/tmp"
_MOST_PROGRAMS, _MOST_OPTIONS = 32, 256
_BLOCKS_AND_FILES = struct.Struct("=16x5Q")


class Room:
    """One root with a /tmp, used by one program at a time."""

    def __init__(self, path: bytes) -> None:
        self._path = path
        self._tmp = path + _PLACE
        self._count = 0
        self._ask, self._answer = linux.prepare_statfs(self._tmp)
        self._mounts: dict[bytes, tuple[Any, ...]] = {}
        self.calls = (linux.prepare_chroot(path), linux.prepare_chdir(_PLACE))
        """System calls by which a process enters."""

    def renew(self, options: bytes) -> None:
        """Give the room an empty /tmp with these mount options.

        Raises:
            OSError: the kernel refuses.
        """
        if not self._count:
            linux.mount(b"/", self._path, None, linux.MS_BIND | linux.MS_REC)
        self._count += 1
        mount = self._mounts.get(options)
        if mount is None:
            if len(self._mounts) > _MOST_OPTIONS:
                self._mounts.clear()
            self._mounts[options] = mount = linux.prepare_mount(self._tmp, b"tmpfs", options)
        if linux.raw_syscall(*mount) == -1:
            linux.raise_errno("mount")

    def leave(self) -> None:
        """Note that the program has ended: what it left in /tmp does not outlive it."""
        if self._count < _MOST_PROGRAMS and linux.raw_syscall(*self._ask) == 0:
            blocks, free, _, files, free_files = _BLOCKS_AND_FILES.unpack_from(self._answer)
            if blocks == free and files == free_files + 1:
                return
        self.clear()

    def clear(self) -> None:
        """Take the room down, with every file system in it."""
        if self._count:
            linux.umount(self._path, linux.MOUNT_DETACH)
            self._count = 0


class Rooms:
    """The rooms of one mount namespace; used by the one process that may mount there."""

    def __init__(self) -> None:
        self._free: list[Room] = []
        self._number = 0

    def take(self, options: bytes) -> Room:
        """Return a room nobody is in, its /tmp empty.

        Args:
            options: mount options of /tmp.

        Raises:
            OSError: the kernel refuses a mount.
        """
        room = self._free.pop() if self._free else self._build()
        try:
            room.renew(options)
        except OSError:
            self.give_back(room)
            raise
        return room

    def _build(self) -> Room:
        if not self._number:
            linux.mount(b"tmpfs", _PLACE, b"tmpfs", linux.MS_NOSUID | linux.MS_NODEV, b"mode=0755,size=64k")
            linux.mount(b"none", _PLACE, None, linux.MS_UNBINDABLE)  # no room holds a copy of the others
        path = b"%s/%d" % (_PLACE, self._number)
        os.mkdir(path)
        self._number += 1
        return Room(path)

    def give_back(self, room: Room) -> None:
        """Note that the program in the room has ended."""
        room.leave()
        self._free.append(room)

    def clear(self) -> None:
        """Take down the rooms nobody is in."""
        for room in self._free:
            room.clear()
