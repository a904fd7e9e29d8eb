# Rows as blocks and streams store them: the compiled form. `_rows.py` has the interpreted form and the layout.

from flagstone.kernels._bytes cimport MASK32, get_i64, get_length, get_u16, get_u64, piece

cdef enum:
    TOMBSTONE_KIND = 0x01
    EXPIRE_FLAG = 0x02
    CREATE_FLAG = 0x04
    MERGE_KIND = 0x08
    KIND_MASK = 0x09
    ROW_CUT_OFF = -3
    FLAGS_UNKNOWN = -4


cdef struct Entry:
    Py_ssize_t shared
    Py_ssize_t unshared
    Py_ssize_t suffix_at
    Py_ssize_t value_at
    Py_ssize_t value_size
    Py_ssize_t tail_at
    Py_ssize_t stop
    int flags


cdef inline Entry new_entry() noexcept nogil:
    cdef Entry entry
    entry.shared = entry.unshared = entry.suffix_at = entry.value_at = entry.value_size = 0
    entry.tail_at = entry.stop = 0
    entry.flags = 0
    return entry


cdef inline bint known_flags(int flags) noexcept nogil:
    return flags & 0xF0 == 0 and flags & KIND_MASK != KIND_MASK


cdef inline Py_ssize_t times_size(int flags) noexcept nogil:
    return 8 * (((flags & EXPIRE_FLAG) >> 1) + ((flags & CREATE_FLAG) >> 2))


cdef inline Py_ssize_t entries_end(const unsigned char* data, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    cdef Py_ssize_t end
    if stop - start < 2:
        return -1
    end = stop - 2 - 2 * get_u16(data, stop - 2)
    return end if end > start else -1


cdef inline int read_lengths(
    const unsigned char* data, Py_ssize_t at, Py_ssize_t end, Entry* entry
) noexcept nogil:
    cdef long long length
    if at + 3 <= end and (data[at] | data[at + 1] | data[at + 2]) < 0x80:
        entry.shared = data[at]
        entry.unshared = data[at + 1]
        entry.value_size = data[at + 2]
        at += 3
    elif at + 4 <= end and (data[at] | data[at + 1] | data[at + 3]) < 0x80:
        # Values of 128 bytes to 16 KiB, which are common enough for a path of their own.
        entry.shared = data[at]
        entry.unshared = data[at + 1]
        entry.value_size = (data[at + 2] & 0x7F) | (data[at + 3] << 7)
        at += 4
    else:
        length = get_length(data, at, end)
        if length < 0:
            return <int>length
        entry.shared = length & <long long>MASK32
        at += length >> 32
        length = get_length(data, at, end)
        if length < 0:
            return <int>length
        entry.unshared = length & <long long>MASK32
        at += length >> 32
        length = get_length(data, at, end)
        if length < 0:
            return <int>length
        entry.value_size = length & <long long>MASK32
        at += length >> 32
    entry.suffix_at = at
    entry.value_at = at + entry.unshared
    entry.tail_at = entry.value_at + entry.value_size
    return 0


cdef inline int read_flags(const unsigned char* data, Py_ssize_t end, Entry* entry) noexcept nogil:
    if entry.tail_at + 8 >= end:
        return ROW_CUT_OFF
    entry.flags = data[entry.tail_at + 8]
    if not known_flags(entry.flags):
        return FLAGS_UNKNOWN
    entry.stop = entry.tail_at + 9 + times_size(entry.flags)
    return ROW_CUT_OFF if entry.stop > end else 0


cdef inline bint read_first(
    const unsigned char* data, Py_ssize_t start, Py_ssize_t stop, Entry* entry
) noexcept nogil:
    cdef Py_ssize_t end = entries_end(data, start, stop)
    if end < 0 or read_lengths(data, start, end, entry):
        return False
    return entry.shared == 0 and entry.value_at <= end


cdef inline long long expires_at(const unsigned char* data, Entry* entry) noexcept nogil:
    return get_i64(data, entry.tail_at + 9) if entry.flags & EXPIRE_FLAG else 0


cdef inline long long created_at(const unsigned char* data, Entry* entry) noexcept nogil:
    return get_i64(data, entry.stop - 8) if entry.flags & CREATE_FLAG else 0


cdef inline tuple row_of(const unsigned char* data, Entry* entry, bytes key):
    return (
        key,
        get_u64(data, entry.tail_at),
        entry.flags & KIND_MASK,
        piece(data, entry.value_at, entry.tail_at),
        created_at(data, entry) if entry.flags & CREATE_FLAG else None,
        expires_at(data, entry) if entry.flags & EXPIRE_FLAG else None,
    )
