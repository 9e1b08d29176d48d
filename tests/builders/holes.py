"""Files of gigabytes that take no disk."""

import os
import sys

# Codes of winioctl.h and minwinbase.h.
_FSCTL_SET_SPARSE = 0x900C4
_FILE_END_OF_FILE_INFO = 6


def extend(file, size):
    """Makes a file that is open for writing larger, by a hole. Windows' C library would write the zeros."""
    file.flush()
    if sys.platform != "win32":
        file.truncate(size)
        return
    import ctypes
    import msvcrt

    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    handle, end = ctypes.c_void_p(msvcrt.get_osfhandle(file.fileno())), ctypes.c_int64(size)
    count = ctypes.c_uint32()
    if not (
        kernel.DeviceIoControl(handle, _FSCTL_SET_SPARSE, None, 0, None, 0, ctypes.byref(count), None)
        and kernel.SetFileInformationByHandle(handle, _FILE_END_OF_FILE_INFO, ctypes.byref(end), 8)
    ):
        raise ctypes.WinError(ctypes.get_last_error())
    assert os.fstat(file.fileno()).st_size == size
