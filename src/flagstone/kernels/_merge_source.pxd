# One source of a merge: the compiled form. `_merge_source.py` has the interpreted form, see `_bytes`.

from flagstone.kernels._bytes cimport get_u64
from flagstone.kernels._rows cimport Entry

cdef enum:
    KEY_ROOM = 65_536 + 192


cdef struct Source:
    Py_ssize_t number
    const unsigned char* data
    const long long* bounds
    const unsigned char* low
    const unsigned char* high
    Py_ssize_t low_size
    Py_ssize_t high_size
    Py_ssize_t block
    Py_ssize_t blocks
    Py_ssize_t begin
    Py_ssize_t at
    Py_ssize_t stop
    Py_ssize_t shareable
    bint sealed
    bint first_row
    Py_ssize_t pause
    Py_ssize_t next_pause
    unsigned char* key
    Py_ssize_t key_size
    unsigned long long head
    unsigned long long seq
    Entry entry
    Source* loser


cdef inline unsigned long long head_of(Source* source, Py_ssize_t skip) noexcept nogil:
    cdef unsigned long long value = 0
    cdef Py_ssize_t index
    if source.key_size >= skip + 8:
        return get_u64(source.key, skip)
    for index in range(skip, skip + 8):
        value <<= 8
        if index < source.key_size:
            value |= source.key[index]
    return value
