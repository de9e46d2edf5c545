"""Building a cell: namespaces, a root of a few read-only directories, and a clean interpreter inside.

The keeper clones a child into new namespaces and writes its user map; the child builds a root on a tmpfs,
moves into it and executes the zygote. Memory, environment, descriptors and directories of the trainer stay
outside. Where root starts it, the cell's user is an unprivileged one (limits do not bind root).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import landlock, linux, seccomp

_Command = tuple[list[str], dict[str, str], set[int]]
"""A program to execute: arguments, environment, descriptors to keep open."""

CELL_UID = 1000
"""The programs' user and group inside."""
CELL_HOME = "/tmp"
_CODE = "/.sandbox"
_PACKAGE = "_mtrl_cell"
_PYTHON = "/opt/python"
_SITE = "/opt/site"
_FIRST_OUTSIDE_ID = 100_000
_KEEPER_OFFSET = 1 << 23
"""More than there can be process ids: a keeper and a cell never share an id."""
_KEEPER_BYTES = 1 << 30
"""Address space of a keeper: the largest message, what it becomes, and large outputs to compare."""
_CELL_SCORE = 1000
_FLAGS = ["-s", "-S", "-P", "-X", "utf8"]
_CAP_SYS_CHROOT, _CAP_SYS_ADMIN = 18, 21
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ENVIRONMENT = {
    "HOME": CELL_HOME,
    "TMPDIR": CELL_HOME,
    "PATH": "/usr/bin",
    "LANG": "C.UTF-8",
    "LD_BIND_NOW": "1",  # every program would resolve the same symbols again
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The paths of this machine that a cell may read."""

    executable: str
    """The base interpreter, symbolic links resolved."""
    prefix: str
    """``sys.base_prefix`` of the interpreter."""
    packages: list[str]
    """Directories of third-party packages that programs may import."""
    bwrap: str
    """Path of bubblewrap; empty where it is not installed."""

    def binds(self) -> list[tuple[str, str]]:
        """Return what the cell sees: (path on this machine, path in the cell), parents first."""
        pairs = [(path, path) for path in ("/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")]
        pairs += [(path, path) for path in ("/lib", "/lib64") if not os.path.islink(path)]
        if self.prefix != "/usr":
            pairs.append((f"{self.prefix}/lib", f"{_PYTHON}/lib"))
        pairs.append((self.executable, self.interpreter))
        pairs += [(package, f"{_SITE}/{os.path.basename(package)}") for package in self.packages]
        return [pair for pair in pairs if os.path.exists(pair[0])]

    def hidden(self) -> list[tuple[str, str]]:
        """Return the site-packages directories that programs must not see.

        As (path on this machine, path in the cell). They lie inside directories of ``binds``.
        """
        places = ("python3*/site-packages", "python3*/dist-packages")
        return [
            (str(path), f"{target}/{path.relative_to(source)}")
            for source, target in self.binds()
            if source not in self.packages
            for place in places
            for path in sorted(Path(source).glob(place))
            if path.is_dir() and not path.is_symlink()
        ]

    @property
    def interpreter(self) -> str:
        """Path of the interpreter in the cell."""
        name = os.path.basename(self.executable)
        return f"/usr/bin/{name}" if self.prefix == "/usr" else f"{_PYTHON}/bin/{name}"


def launch(layout: Layout, control: socket.socket, level: str = "namespaces") -> int:
    """Start a zygote in a new cell and return its process id; it answers on the socket ``control``.

    Raises:
        OSError: ``level`` is unknown or cannot be had here; the message names the step that failed.
    """
    if level == "namespaces":
        flags = linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET
        flags |= linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
        return _start(flags, lambda: _enter_namespaces(layout, control))
    if level == "landlock":
        if landlock.abi_version() < 1:
            raise OSError("this kernel has no Landlock")
        return _start(0, lambda: _enter_flat(layout, control))
    if level == "bwrap":
        if not layout.bwrap:
            raise OSError("bubblewrap (the program bwrap) is not installed")
        return _start(0, lambda: _enter_bwrap(layout, control))
    raise OSError(f"unknown level {level!r}")


def _start(flags: int, enter: Callable[[], _Command]) -> int:
    """Clone; in the child run ``enter`` and execute what it returns; a failure of either is an OSError."""
    go_read, go_write = os.pipe()
    error_read, error_write = os.pipe()
    pid = linux.clone(flags)
    if pid == 0:
        try:
            os.close(go_write)
            os.close(error_read)
            linux.set_parent_death_signal(signal.SIGKILL)
            if os.read(go_read, 1) != b"g":
                os._exit(1)
            arguments, environment, keep = enter()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            low = 3
            for descriptor in sorted(d for d in {*keep, error_write} if d >= low):
                os.closerange(low, descriptor)
                low = descriptor + 1
            os.closerange(low, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            for descriptor in keep:
                os.set_inheritable(descriptor, True)
            os.execve(arguments[0], arguments, environment)
        except BaseException as error:  # noqa: BLE001 - the one way out of this child: tell the keeper
            os.write(error_write, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(go_read)
    os.close(error_write)
    try:
        prefer_as_victim(pid, _CELL_SCORE)
        if flags & linux.CLONE_NEWUSER:
            outside = outside_id()
            group = outside if outside != os.geteuid() else os.getegid()
            if os.geteuid() != 0 or outside == 0:
                Path(f"/proc/{pid}/setgroups").write_text("deny")
            Path(f"/proc/{pid}/uid_map").write_text(f"{CELL_UID} {outside} 1")
            Path(f"/proc/{pid}/gid_map").write_text(f"{CELL_UID} {group} 1")
        os.write(go_write, b"g")
        with os.fdopen(error_read, "rb") as errors:  # closed by a successful exec
            error_read = -1
            if message := errors.read(4096):
                raise OSError(message.decode("utf-8", "replace"))
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(go_write)
        if error_read >= 0:
            os.close(error_read)
    return pid


def outside_id(offset: int = 0) -> int:
    """Return the user id that the cell of this process has outside of its namespace.

    Root gets an unused id, the process's pid plus a constant and ``offset`` (a keeper has another offset than
    its cell), or 0 if this user namespace does not map it. Any other caller gets its own id.
    """
    wanted = _FIRST_OUTSIDE_ID + offset + os.getpid()
    if os.geteuid() != 0:
        return os.geteuid()
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= wanted < first + count:
            return wanted
    return 0


def confine() -> None:
    """Give up all rights that a keeper does not need once its cell is up.

    Root becomes a user that owns no file. The process leaves the network, gets a memory limit, and can open
    no file and start no process any more.
    """
    with contextlib.suppress(OSError):  # where namespaces are refused the filter alone bars the network
        linux.syscall(linux.NR_UNSHARE, linux.CLONE_NEWNET | (linux.CLONE_NEWUSER if os.geteuid() else 0))
    if (mine := outside_id(_KEEPER_OFFSET)) and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(mine, mine, mine)
        os.setresuid(mine, mine, mine)
    linux.set_parent_death_signal(signal.SIGKILL)  # a change of user clears it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _KEEPER_BYTES if hard == resource.RLIM_INFINITY else min(hard, _KEEPER_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    linux.set_no_new_privs()
    seccomp.install(seccomp.keeper_filter())


def prefer_as_victim(pid: int, score: int) -> None:
    """Set when the kernel, out of memory, ends process ``pid`` and later children; ``score`` 1000 = first."""
    with contextlib.suppress(OSError):  # a container may hide the file; the score is a wish, not a fence
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot {name}: {error}") from error


def _enter_namespaces(layout: Layout, control: socket.socket) -> _Command:
    """Build the root and move in; return the zygote's command."""
    with _step("read what the cell needs"):
        # while still the outside user: the interpreter may lie under a home that only its owner can enter
        sources = [(os.open(source, os.O_PATH | os.O_CLOEXEC), target) for source, target in layout.binds()]
        devices = [(os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC), name) for name in _DEVICES]
        hidden = [target for _, target in layout.hidden()]
        code = {path.name: path.read_bytes() for path in Path(__file__).parent.glob("*.py")}
        cache = Path("/etc/ld.so.cache").read_bytes() if os.path.exists("/etc/ld.so.cache") else None
    with _step("become the cell's user"):
        if Path("/proc/self/setgroups").read_text().strip() == "allow":
            os.setgroups([])
        os.setresgid(CELL_UID, CELL_UID, CELL_UID)
        os.setresuid(CELL_UID, CELL_UID, CELL_UID)
        linux.set_parent_death_signal(signal.SIGKILL)  # a change of user clears it
    with _step("build the cell's root"):
        base = "/tmp"
        linux.mount(b"none", b"/", None, linux.MS_REC | linux.MS_PRIVATE)
        linux.mount(b"root", base.encode(), b"tmpfs", linux.MS_NOSUID | linux.MS_NODEV, b"size=2m,mode=0755")
        for directory in ("tmp", "dev", "etc", "proc", "usr/bin", "opt", f"{_CODE}/{_PACKAGE}".strip("/")):
            os.makedirs(f"{base}/{directory}", exist_ok=True)
        for link in ("/lib", "/lib64"):
            if os.path.islink(link):
                os.symlink(os.readlink(link), base + link)
        for name, text in code.items():
            Path(f"{base}{_CODE}/{_PACKAGE}/{name}").write_bytes(text)
        etc = Path(f"{base}/etc")
        (etc / "passwd").write_text(f"sandbox:x:{CELL_UID}:{CELL_UID}:sandbox:{CELL_HOME}:/bin/false\n")
        (etc / "group").write_text(f"sandbox:x:{CELL_UID}:\n")
        (etc / "hosts").write_text("127.0.0.1 localhost\n")
        if cache is not None:
            (etc / "ld.so.cache").write_bytes(cache)
        for descriptor, target in sources:
            _bind(descriptor, base + target)
            linux.set_mount_read_only((base + target).encode())
        for target in hidden:
            flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_RDONLY
            linux.mount(b"none", (base + target).encode(), b"tmpfs", flags, b"size=4k,nr_inodes=2,mode=0555")
        for descriptor, name in devices:
            _bind(descriptor, f"{base}/dev/{name}")
        os.symlink(CELL_HOME, f"{base}/dev/shm")
        proc, place = -1, f"{base}/proc"
        try:
            flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
            linux.mount(b"proc", place.encode(), b"proc", flags)
        except OSError:
            pass  # it may not be mounted everywhere
        else:
            # without a path: the zygote alone reads there how long a program waited for a CPU
            proc = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            linux.umount(place.encode())
        os.chdir(base)
        linux.syscall(linux.NR_PIVOT_ROOT, b".", b".")
        linux.umount(b".")
        os.chdir("/")
        # not recursive: the device nodes need a mount without nodev
        linux.mount(
            b"none", b"/", None,
            linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV,
        )  # fmt: skip
    socket.sethostname("sandbox")
    linux.set_no_new_privs()
    linux.keep_capabilities_over_exec([_CAP_SYS_CHROOT, _CAP_SYS_ADMIN])
    control_copy = _take_null_and_copy(control)
    keep = {control_copy, proc} if proc >= 0 else {control_copy}
    arguments = [layout.interpreter, *_FLAGS, "-c", _starter(control_copy, proc)]
    return arguments, _environment(layout, f"{_PYTHON}/lib"), keep


def _enter_flat(layout: Layout, control: socket.socket) -> _Command:
    """Return the zygote's command for a cell without namespaces; it confines itself with Landlock."""
    readable = [source for source, _ in layout.binds()]
    library = str(Path(__file__).parents[1])
    _become_outsider([*readable, __file__])
    control_copy = _take_null_and_copy(control)
    hidden = {source for source, _ in layout.hidden()}
    # a directory above something hidden is only listed; the paths in it that hold nothing hidden are readable
    listed: list[str] = []
    visible: list[str] = []
    while readable:
        path = readable.pop()
        if path in hidden:
            continue
        if any(place.startswith(f"{path}/") for place in hidden):
            listed.append(path)
            # the target of a link is visible where it lies, or not at all
            readable += [entry.path for entry in os.scandir(path) if not entry.is_symlink()]
        else:
            visible.append(path)
    host = {
        "readable": [*visible, "/etc/ld.so.cache"],
        "listed": listed,
        "devices": [f"/dev/{name}" for name in _DEVICES],
        "packages": layout.packages,
    }
    search = f"import sys; sys.path.insert(0, {library!r}); from cell.zygote import main; "
    starter = f"{search}sys.path.remove({library!r}); main({control_copy}, -1, {host!r})"
    arguments = [layout.executable, *_FLAGS, "-c", starter]
    return arguments, _environment(layout, f"{layout.prefix}/lib"), {control_copy}


def _enter_bwrap(layout: Layout, control: socket.socket) -> _Command:
    """Return the command that lets bubblewrap build the cell; programs still get their own namespaces."""
    code = str(Path(__file__).parent)
    _become_outsider([*(source for source, _ in layout.binds()), __file__])
    control_copy = _take_null_and_copy(control)
    arguments = [layout.bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1"]
    arguments += ["--uid", str(CELL_UID), "--gid", str(CELL_UID), "--hostname", "sandbox"]
    arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SYS_CHROOT"]
    for source, target in [*layout.binds(), (code, f"{_CODE}/{_PACKAGE}")]:
        arguments += ["--ro-bind", source, target]
    for _, target in layout.hidden():
        arguments += ["--tmpfs", target, "--remount-ro", target]
    for name in _DEVICES:
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for link in ("/lib", "/lib64"):
        if os.path.islink(link):
            arguments += ["--symlink", os.readlink(link), link]
    if os.path.exists("/etc/ld.so.cache"):
        arguments += ["--ro-bind", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    arguments += ["--dir", "/tmp", "--symlink", "/tmp", "/dev/shm", "--remount-ro", "/", "--chdir", "/"]
    arguments += ["--", layout.interpreter, *_FLAGS, "-c", _starter(control_copy, -1)]
    return arguments, _environment(layout, f"{_PYTHON}/lib"), {control_copy}


def _starter(control: int, proc: int) -> str:
    return (
        f"import sys; sys.path.insert(0, {_CODE!r}); from {_PACKAGE}.zygote import main; "
        f"sys.path[:] = [p for p in sys.path if p != {_CODE!r}] + [{_SITE!r}]; main({control}, {proc})"
    )


def _environment(layout: Layout, library: str) -> dict[str, str]:
    return _ENVIRONMENT if layout.prefix == "/usr" else {**_ENVIRONMENT, "LD_LIBRARY_PATH": library}


def _become_outsider(needed: list[str]) -> None:
    """As root, become the cell's outside user if all users can read every path that the cell needs."""
    if not (mine := outside_id()) or os.geteuid() != 0:
        return
    paths = {parent for path in needed for parent in (Path(path), *Path(path).parents)}
    if all(os.stat(path).st_mode & (0o5 if path.is_dir() else 0o4) for path in paths):
        with _step("become the cell's user"):
            os.setgroups([])
            os.setresgid(mine, mine, mine)
            os.setresuid(mine, mine, mine)
            linux.set_parent_death_signal(signal.SIGKILL)


def _take_null_and_copy(control: socket.socket) -> int:
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    return os.dup(control.fileno())


def _bind(descriptor: int, target: str) -> None:
    source = f"/proc/self/fd/{descriptor}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    linux.mount(source.encode(), target.encode(), None, linux.MS_BIND | linux.MS_REC)
