# Rows as a memtable stores them: the compiled form. `_entries.py` has the interpreted form and the layout, see `_bytes`.

from flagstone.kernels._bytes cimport compare, get_little, piece
from flagstone.kernels._rows cimport CREATE_FLAG, EXPIRE_FLAG, KIND_MASK

cdef enum:
    HEADER = 39
    CHUNK_BYTES = 1 << 18
    OFFSET_BITS = 18
    OFFSET_MASK = (1 << 18) - 1
    ANCHOR_FLAG = 0x80


cdef inline unsigned long long address_of(Py_ssize_t chunk, Py_ssize_t at) noexcept nogil:
    return (<unsigned long long>(chunk + 1) << OFFSET_BITS) | <unsigned long long>at


cdef inline unsigned char* chunk_of(unsigned long long[::1] chunks, unsigned long long address) noexcept nogil:
    return <unsigned char*>chunks[<Py_ssize_t>(address >> OFFSET_BITS) - 1]


cdef inline Py_ssize_t offset_of(unsigned long long address) noexcept nogil:
    return <Py_ssize_t>(address & OFFSET_MASK)


cdef inline unsigned long long entry_link(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return get_little(data, at, 8)


cdef inline unsigned long long entry_seq(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return get_little(data, at + 8, 8)


cdef inline long long entry_expires(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return <long long>get_little(data, at + 16, 8)


cdef inline long long entry_created(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return <long long>get_little(data, at + 24, 8)


cdef inline Py_ssize_t value_size(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return <Py_ssize_t>get_little(data, at + 32, 4)


cdef inline Py_ssize_t key_size(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return <Py_ssize_t>get_little(data, at + 36, 2)


cdef inline int entry_flags(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return data[at + 38]


cdef inline Py_ssize_t entry_size(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return HEADER + key_size(data, at) + value_size(data, at)


cdef inline bytes entry_key(const unsigned char* data, Py_ssize_t at):
    return piece(data, at + HEADER, at + HEADER + key_size(data, at))


cdef inline tuple entry_row(const unsigned char* data, Py_ssize_t at, bytes key):
    cdef int flags = entry_flags(data, at)
    cdef Py_ssize_t value_at = at + HEADER + len(key)
    return (
        key,
        entry_seq(data, at),
        flags & KIND_MASK,
        piece(data, value_at, value_at + value_size(data, at)),
        entry_created(data, at) if flags & CREATE_FLAG else None,
        entry_expires(data, at) if flags & EXPIRE_FLAG else None,
    )


cdef inline unsigned long long newest(
    unsigned long long[::1] chunks, unsigned long long anchor, unsigned long long max_seq
) noexcept nogil:
    cdef unsigned long long address
    cdef const unsigned char* data
    cdef Py_ssize_t at
    if anchor == 0:
        return 0
    address = entry_link(chunk_of(chunks, anchor), offset_of(anchor))
    if address == 0:
        address = anchor
    while True:
        data = chunk_of(chunks, address)
        at = offset_of(address)
        if entry_seq(data, at) <= max_seq:
            return address
        if address == anchor:
            return 0
        address = entry_link(data, at)


cdef inline int compare_keys(unsigned long long[::1] chunks, unsigned long long one, unsigned long long two) noexcept nogil:
    cdef const unsigned char* one_data = chunk_of(chunks, one)
    cdef const unsigned char* two_data = chunk_of(chunks, two)
    cdef Py_ssize_t one_at = offset_of(one)
    cdef Py_ssize_t two_at = offset_of(two)
    return compare(
        one_data, one_at + HEADER, key_size(one_data, one_at), two_data, two_at + HEADER, key_size(two_data, two_at)
    )
