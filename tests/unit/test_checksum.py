"""Window checksums: what goes in, what comes out, and which code serves it."""

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest

from merkle.checksum import (
    KERNEL_BYTES_MIN,
    WIDTH,
    Buffer,
    ChecksumType,
    Kernels,
    fingerprint,
    fold,
    implementations,
    kernels_for,
    library_windows,
    window_checksums,
)

# The check values that every CRC catalogue lists.
CHECK = b"123456789"
CHECK_ENTRIES = {
    ChecksumType.CRC32: "cbf43926",
    ChecksumType.CRC32C: "e3069283",
    ChecksumType.SHA256: "15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225",
    ChecksumType.MD5: "25f9e794323b453885f5181f1b624d0b",
}
DATA = np.random.default_rng(7).integers(0, 256, 200_000, np.uint8).tobytes()


@pytest.fixture
def kernel() -> Kernels:
    """The kernels; the test is skipped where there are none."""
    found = kernels_for(KERNEL_BYTES_MIN)
    if found is None:
        pytest.skip(f"no kernels: {implementations()['CRC32']}")
    return found


def fresh_interpreter(code: str, **environment: str) -> str:
    """What `code` prints in an interpreter that has loaded nothing of ours yet."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("checksum_type", "entry"), CHECK_ENTRIES.items(), ids=lambda value: str(value)[:8]
)
def test_one_window_gives_the_check_value(checksum_type: ChecksumType, entry: str) -> None:
    assert window_checksums(CHECK, checksum_type, 16384).hex() == entry
    assert WIDTH[checksum_type] == len(entry) // 2


@pytest.mark.parametrize("name", ["crc32_windows", "crc32c_windows"])
def test_a_kernel_gives_the_check_value(kernel: Kernels, name: str) -> None:
    expected = CHECK_ENTRIES[ChecksumType.CRC32C if "crc32c" in name else ChecksumType.CRC32]
    assert getattr(kernel, name)(memoryview(CHECK), 9).hex() == expected
    assert getattr(kernel, name)(memoryview(CHECK * 3), 9).hex() == expected * 3


@pytest.mark.parametrize("checksum_type", list(CHECK_ENTRIES))
def test_every_window_has_one_entry_and_the_last_may_be_short(checksum_type: ChecksumType) -> None:
    entries = window_checksums(CHECK * 2 + b"1", checksum_type, 9)
    width = WIDTH[checksum_type]
    assert len(entries) == 3 * width
    assert entries[:width] == entries[width : 2 * width]
    assert entries[2 * width :] == window_checksums(b"1", checksum_type, 9)


@pytest.mark.parametrize("checksum_type", list(ChecksumType))
def test_no_data_have_no_entries(checksum_type: ChecksumType) -> None:
    assert window_checksums(b"", checksum_type, 16384) == b""
    assert window_checksums(np.empty(0, np.uint8), checksum_type, 16384) == b""


def test_type_none_has_no_entries_whatever_the_window() -> None:
    assert window_checksums(DATA, ChecksumType.NONE, 0) == b""


@pytest.mark.parametrize("checksum_type", list(CHECK_ENTRIES))
@pytest.mark.parametrize("bytes_per_checksum", [1000, 1024, 16384, len(DATA), 1 << 31])
def test_all_kinds_of_buffers_give_the_same_entries(
    checksum_type: ChecksumType, bytes_per_checksum: int
) -> None:
    expected = library_windows(memoryview(DATA), checksum_type, bytes_per_checksum)
    read_only = np.frombuffer(DATA, np.uint8)
    with mmap(-1, len(DATA)) as mapped:
        mapped[:] = DATA
        buffers: list[Buffer] = [
            DATA,
            bytearray(DATA),
            memoryview(DATA),
            memoryview(bytearray(DATA)),
            mapped,
        ]
        for buffer in buffers:
            assert window_checksums(buffer, checksum_type, bytes_per_checksum) == expected
    for array in (
        read_only,
        read_only.copy(),
        read_only.view(">u2") if len(DATA) % 2 == 0 else read_only,
    ):
        assert window_checksums(array, checksum_type, bytes_per_checksum) == expected


def test_a_caller_may_change_its_buffer_afterwards(kernel: Kernels) -> None:
    """The kernels look at data through a read-only array; the caller's own must stay
    writable.
    """
    array = np.frombuffer(bytearray(DATA), np.uint8)
    before = window_checksums(array, ChecksumType.CRC32, 16384)
    array[5] ^= 1
    after = window_checksums(array, ChecksumType.CRC32, 16384)
    assert before[:4] != after[:4]
    assert before[4:] == after[4:]


def test_fold_of_nothing_is_zero() -> None:
    """So a chunk without checksums, and a container without blocks, have checksum 0."""
    assert fold(b"") == 0
    assert fold(CHECK) == 0xE3069283


def test_a_fingerprint_is_16_bytes_that_change_with_any_bit() -> None:
    assert len(fingerprint(b"")) == 16
    assert fingerprint(DATA) == fingerprint(bytearray(DATA))
    assert fingerprint(DATA) != fingerprint(DATA[:-1] + bytes([DATA[-1] ^ 1]))


def test_kernels_names_what_serves_each_type() -> None:
    served = implementations()
    assert set(served) == {"CRC32", "CRC32C", "SHA256", "MD5", "fold"}
    if kernels_for(KERNEL_BYTES_MIN) is None:
        assert "no kernels" in served["CRC32"]
    else:
        assert served["CRC32C"].startswith("numba")


def test_numba_is_loaded_only_once_there_was_enough_work_for_it(kernel: Kernels) -> None:
    code = (
        "import sys\n"
        "from merkle.checksum import KERNEL_BYTES_MIN, ChecksumType\n"
        "from merkle.checksum import kernels_for, window_checksums\n"
        "piece = bytes(KERNEL_BYTES_MIN // 4)\n"
        "for _ in range(4):\n"
        "    print('numba' in sys.modules, 'numpy' in sys.modules)\n"
        "    window_checksums(piece, ChecksumType.CRC32, 16384)\n"
        "print('numba' in sys.modules, kernels_for(1) is not None)"
    )
    assert fresh_interpreter(code).splitlines() == ["False False"] * 4 + ["True True"]


def test_without_numba_the_library_serves_and_kernels_says_why() -> None:
    code = (
        "import sys\n"
        "sys.modules['numba'] = None\n"
        "from merkle.checksum import ChecksumType, implementations, window_checksums\n"
        "said = implementations()['CRC32C']\n"
        "print(window_checksums(b'123456789' * 20000, ChecksumType.CRC32C, 9)[-4:].hex(), said)"
    )
    said = fresh_interpreter(code)
    assert (
        said.strip()
        == "e3069283 fastcrc per window (no kernels: the extra `fast` is not installed)"
    )


def test_a_switched_off_compiler_is_said_and_survived() -> None:
    code = "from merkle.checksum import implementations; print(implementations()['fold'])"
    assert "no kernels" in fresh_interpreter(code, NUMBA_DISABLE_JIT="1")


def test_first_use_by_many_threads_and_without_a_cache_folder(kernel: Kernels) -> None:
    """A cache folder that cannot be made costs time, not the kernels; threads that load
    them together all get them.
    """
    code = (
        "from concurrent.futures import ThreadPoolExecutor\nfrom merkle.checksum import"
        " KERNEL_BYTES_MIN, kernels_for, implementations\n"
        "with ThreadPoolExecutor(8) as pool:\n    jobs ="
        " [pool.submit(kernels_for, KERNEL_BYTES_MIN) for _ in range(8)]\nfound = [job.result() for"
        " job in jobs]\nprint({kernel.crc32_windows(memoryview(b'123456789'), 9).hex() for kernel"
        " in found}, implementations()['CRC32'])"
    )
    said = fresh_interpreter(code, NUMBA_CACHE_DIR="/proc/no/such/folder")
    assert said.startswith("{'cbf43926'} numba")


@pytest.mark.crashes
def test_a_torn_cache_is_survived(kernel: Kernels, tmp_path: Path) -> None:
    """Of a kernel its index, its code or both, which end early or are empty."""
    code = "from merkle.checksum import implementations; print(implementations()['CRC32'])"
    fresh_interpreter(code, NUMBA_CACHE_DIR=str(tmp_path))
    for suffix, offset in ((".nbi", 0), (".nbc", 1)):
        files = sorted(tmp_path.rglob(f"*{suffix}"))
        assert len(files) > 3
        for number, path in enumerate(files):
            if (kept_bytes := (0, 100, None)[(number + offset) % 3]) is not None:
                os.truncate(path, kept_bytes)
    assert fresh_interpreter(code, NUMBA_CACHE_DIR=str(tmp_path)).startswith("numba")


def test_threads_share_the_kernels(kernel: Kernels) -> None:
    pieces = [DATA[i:] for i in range(16)]
    with ThreadPoolExecutor(4) as pool:
        entries = list(
            pool.map(lambda piece: window_checksums(piece, ChecksumType.CRC32C, 512), pieces)
        )
    assert entries == [
        library_windows(memoryview(piece), ChecksumType.CRC32C, 512) for piece in pieces
    ]


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("+sse4.2,+crc32,+pclmul", "128 bits"),
        ("+sse4.2,+crc32,+avx2,+pclmul,+vpclmulqdq", "256 bits"),
        ("+sse4.2,+crc32,+avx2", "no carry-less multiplication"),
    ],
    ids=["narrow", "wider", "none"],
)
def test_lesser_processors_get_narrower_kernels_or_none(
    kernel: Kernels, tmp_path: Path, features: str, expected: str
) -> None:
    """Each kernel proves itself against crcmod as it loads, so that its name says that
    it works.
    """
    if platform.machine() != "x86_64":
        pytest.skip("names of x86 features")
    flags = Path("/proc/cpuinfo").read_text()
    if "vpclmulqdq" in features and "vpclmulqdq" not in flags:
        pytest.skip("this processor is a lesser one")
    code = "from merkle.checksum import implementations; print(implementations()['CRC32'])"
    said = fresh_interpreter(
        code, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=features, NUMBA_CACHE_DIR=str(tmp_path)
    )
    assert expected in said
