"""The system call filter, run on every call number in an interpreter of its instructions."""

import struct

import pytest

from multitask_rl.sandbox.cell.seccomp import keeper_filter, program_filter, zygote_filter

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
ENOTTY = 0x00050019
X86_64, I386 = 0xC000003E, 0x40000003
READ, OPEN, IOCTL, SOCKET, CLONE, FORK, EXECVE, KILL_CALL = 0, 2, 16, 41, 56, 57, 59, 62
FCNTL, CHMOD, PTRACE, PRCTL, MOUNT, KEYCTL, UNSHARE = 72, 90, 101, 157, 165, 250, 272
PRLIMIT, MEMFD, IO_URING, CLONE3 = 302, 319, 425, 435
SENDTO, SENDMSG, RECVMSG, SETSOCKOPT, GETSOCKOPT = 44, 46, 47, 54, 55
DENIED = (
    *(SOCKET, 42, 49, FORK, 58, EXECVE, 322, PTRACE, UNSHARE, 308, IO_URING, 426, KEYCTL, 248, MEMFD, MOUNT),
    *(166, 155, 161, 310, 311, 438, 321, 298, 323, 304, 317, 434, 424, 29, 64, 68, 240, 133, 259, 73),
    *(105, 109, 324, 447),
)
THREAD_FLAGS = 0x3D0F00
NEW_USER = 0x10000000 | 17


def run_filter(code, number, *arguments, arch=X86_64):
    """Return the action of the filter: the kernel's classic BPF, as far as it is used."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, arch, 0, *[a & (1 << 64) - 1 for a in padded])
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, k = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif operation == 0x06:
            return k
        else:
            is_true = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[operation]
            at += if_true if is_true else if_false


def decide(number, *arguments, own_pid=None):
    """Return the stricter action of both stages, as the kernel does."""
    actions = [run_filter(c, number, *arguments) for c in (zygote_filter(), program_filter(own_pid))]
    return next((a for a in actions if a != ALLOW), ALLOW)


def test_every_call_gets_a_decision():
    for own_pid in (None, 77):
        assert all(
            decide(number, own_pid=own_pid) in (ALLOW, EPERM, ENOSYS, ENOTTY, KILL) for number in range(600)
        )


@pytest.mark.parametrize("number", [READ, OPEN, 1, 3, 9, 12, 202, 228, 231, 257, 262, 318, 334])
def test_what_the_interpreter_needs_is_allowed(number):
    assert decide(number) == ALLOW


@pytest.mark.parametrize("number", DENIED)
def test_what_reaches_the_kernel_or_others_is_refused(number):
    assert decide(number) == EPERM


def test_a_thread_is_allowed_and_a_process_is_not():
    assert decide(CLONE, THREAD_FLAGS) == ALLOW
    assert decide(CLONE, 17) == EPERM
    assert decide(CLONE, NEW_USER) == EPERM
    assert decide(CLONE3) == ENOSYS
    assert decide(CLONE, THREAD_FLAGS | 0x1000) == EPERM  # a handle of the thread
    assert decide(CLONE, THREAD_FLAGS | 0x20000) == EPERM  # a mount namespace


def test_descriptors_cannot_be_sent_and_sockets_keep_their_buffers():
    assert decide(SENDMSG) == KILL
    assert decide(SETSOCKOPT, 3, 1, 7) == EPERM
    assert decide(SENDTO) == decide(RECVMSG) == ALLOW


def test_a_socket_says_its_type_and_errors_and_nothing_of_its_peer():
    for option in (3, 4, 39):
        assert decide(GETSOCKOPT, 3, 1, option) == ALLOW
    for peer in (17, 31, 59, 77):  # credentials, security, groups, a handle
        assert decide(GETSOCKOPT, 3, 1, peer) == EPERM


def test_no_filter_of_a_programs_own():
    assert decide(PRCTL, 22, 2) == decide(PRCTL, 38, 1) == EPERM
    assert decide(PRCTL, 15) == decide(PRCTL, 39) == ALLOW


def test_a_keeper_opens_no_file_and_starts_nothing():
    refused = (
        OPEN,
        257,
        SOCKET,
        42,
        CLONE,
        FORK,
        EXECVE,
        KILL_CALL,
        PTRACE,
        MOUNT,
        UNSHARE,
        161,
        437,
        435,
        424,
    )
    assert {run_filter(keeper_filter(), number) for number in refused} == {EPERM}
    assert {run_filter(keeper_filter(), number) for number in (READ, 1, 3, 7, 9, SENDMSG, MEMFD, 231)} == {
        ALLOW
    }


def test_other_machines_and_the_x32_numbers_end_the_process():
    assert run_filter(zygote_filter(), READ, arch=I386) == KILL
    assert run_filter(zygote_filter(), READ | 0x40000000) == KILL


def test_only_harmless_commands_of_ioctl_and_fcntl_are_allowed():
    assert decide(IOCTL, 1, 0x5401) == ALLOW
    assert decide(IOCTL, 0, 0x5412) == ENOTTY
    assert decide(FCNTL, 1, 3) == ALLOW
    assert decide(FCNTL, 1, 1024) == EPERM


def test_a_newer_call_looks_absent_so_that_the_c_library_falls_back():
    assert decide(463) == decide(599) == ENOSYS


def test_without_a_process_namespace_only_the_own_process_may_be_named():
    assert decide(KILL_CALL, 77, 9, own_pid=77) == decide(PRLIMIT, 0, own_pid=77) == ALLOW
    assert decide(KILL_CALL, 78, 9, own_pid=77) == EPERM
    assert decide(KILL_CALL, -1, 9, own_pid=77) == EPERM
    assert decide(PRLIMIT, 1, own_pid=77) == EPERM
    assert decide(PRCTL, 1, own_pid=77) == EPERM
    assert decide(CHMOD, own_pid=77) == EPERM
    assert decide(KILL_CALL, 78, 9) == decide(CHMOD) == decide(PRCTL, 1) == ALLOW
