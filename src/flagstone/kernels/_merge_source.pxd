# One source of a merge: the compiled form. `_merge_source.py` has the interpreted form, see `_bytes`.

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
    unsigned char* key
    Py_ssize_t key_size
    unsigned long long head
    unsigned long long seq
    Entry entry
    Source* loser
