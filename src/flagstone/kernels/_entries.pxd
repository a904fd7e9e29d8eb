# Rows as a memtable stores them: the compiled form. `_entries.py` has the interpreted form and the layout, see `_bytes`.

from flagstone.kernels._bytes cimport compare, get_little, piece, put_little
from flagstone.kernels._rows cimport CREATE_FLAG, EXPIRE_FLAG, KIND_MASK

cdef enum:
    HEADER = 22
    WIDE_BYTES = 20
    EXPIRE_BYTES = 8
    CHUNK_BYTES = 1 << 18
    OFFSET_BITS = 18
    OFFSET_MASK = (1 << 18) - 1
    ANCHOR_FLAG = 0x80
    WIDE_FLAG = 0x40

cdef extern from *:
    """
    #define FLAGSTONE_LINK_MASK 0xFFFFFFFFFFULL
    #define FLAGSTONE_WIDE_FROM_SEQ 0x10000000000ULL
    #define FLAGSTONE_WIDE_FROM_SIZE 0x1000000LL
    #define FLAGSTONE_WIDE_FROM_MS 0x1000000000000LL
    /* A branch: the processor reads the key of a row before the flags have come from memory. */
    #ifdef __GNUC__
    #define FLAGSTONE_RARELY(condition) __builtin_expect(!!(condition), 0)
    #else
    #define FLAGSTONE_RARELY(condition) (condition)
    #endif
    """
    const unsigned long long LINK_MASK "FLAGSTONE_LINK_MASK"
    const unsigned long long WIDE_FROM_SEQ "FLAGSTONE_WIDE_FROM_SEQ"
    const long long WIDE_FROM_SIZE "FLAGSTONE_WIDE_FROM_SIZE"
    const long long WIDE_FROM_MS "FLAGSTONE_WIDE_FROM_MS"
    bint _rarely "FLAGSTONE_RARELY"(int condition) noexcept nogil


cdef inline unsigned long long address_of(Py_ssize_t chunk, Py_ssize_t at) noexcept nogil:
    return (<unsigned long long>(chunk + 1) << OFFSET_BITS) | <unsigned long long>at


cdef inline unsigned char* chunk_of(unsigned long long[::1] chunks, unsigned long long address) noexcept nogil:
    return <unsigned char*>chunks[<Py_ssize_t>(address >> OFFSET_BITS) - 1]


cdef inline Py_ssize_t offset_of(unsigned long long address) noexcept nogil:
    return <Py_ssize_t>(address & OFFSET_MASK)


cdef inline Py_ssize_t header_size(int flags) noexcept nogil:
    return HEADER + (flags & EXPIRE_FLAG) * (EXPIRE_BYTES // 2) + ((flags & WIDE_FLAG) >> 6) * WIDE_BYTES


cdef inline int flags_for(int flags, unsigned long long seq, long long created, Py_ssize_t value_bytes) noexcept nogil:
    if seq < WIDE_FROM_SEQ and 0 <= created and created < WIDE_FROM_MS and value_bytes < WIDE_FROM_SIZE:
        return flags
    return flags | WIDE_FLAG


cdef inline void put_header(
    unsigned char* out, Py_ssize_t at, unsigned long long link, Py_ssize_t key_bytes, int flags,
    unsigned long long seq, Py_ssize_t value_bytes, long long created, long long expires,
) noexcept nogil:
    put_little(
        out, at, link | <unsigned long long>key_bytes << 40 | <unsigned long long>flags << 56, 8
    )
    if flags & WIDE_FLAG:
        put_little(out, at + 8, 0, 8)
        put_little(out, at + 16, 0, 6)
        put_little(out, at + 22, seq, 8)
        put_little(out, at + 30, <unsigned long long>created, 8)
        put_little(out, at + 38, <unsigned long long>value_bytes, 4)
    else:
        put_little(out, at + 8, seq | <unsigned long long>value_bytes << 40, 8)
        put_little(out, at + 16, <unsigned long long>created, 4)
        put_little(out, at + 20, <unsigned long long>created >> 32, 2)
    if flags & EXPIRE_FLAG:
        put_little(out, at + header_size(flags) - EXPIRE_BYTES, <unsigned long long>expires, 8)


cdef inline void put_link(unsigned char* out, Py_ssize_t at, unsigned long long link) noexcept nogil:
    put_little(out, at, get_little(out, at, 8) & ~LINK_MASK | link, 8)


cdef inline unsigned long long entry_link(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return get_little(data, at, 8) & LINK_MASK


cdef inline Py_ssize_t key_size(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return data[at + 5] | data[at + 6] << 8


cdef inline int entry_flags(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return data[at + 7]


cdef inline unsigned long long entry_seq(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    if _rarely(entry_flags(data, at) & WIDE_FLAG):
        return get_little(data, at + 22, 8)
    return get_little(data, at + 8, 8) & LINK_MASK


cdef inline Py_ssize_t value_size(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    if _rarely(entry_flags(data, at) & WIDE_FLAG):
        return <Py_ssize_t>get_little(data, at + 38, 4)
    return <Py_ssize_t>(get_little(data, at + 8, 8) >> 40)


cdef inline long long entry_created(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    if _rarely(entry_flags(data, at) & WIDE_FLAG):
        return <long long>get_little(data, at + 30, 8)
    return <long long>(get_little(data, at + 14, 8) >> 16)


cdef inline Py_ssize_t key_start(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    cdef int flags = entry_flags(data, at)
    if _rarely(flags & (EXPIRE_FLAG | WIDE_FLAG)):
        return at + header_size(flags)
    return at + HEADER


cdef inline long long entry_expires(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return <long long>get_little(data, key_start(data, at) - EXPIRE_BYTES, 8)


cdef inline Py_ssize_t entry_size(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return header_size(entry_flags(data, at)) + key_size(data, at) + value_size(data, at)


cdef inline bytes entry_key(const unsigned char* data, Py_ssize_t at):
    cdef Py_ssize_t begin = key_start(data, at)
    return piece(data, begin, begin + key_size(data, at))


cdef inline tuple entry_row(const unsigned char* data, Py_ssize_t at, bytes key):
    cdef int flags = entry_flags(data, at)
    cdef Py_ssize_t value_at = key_start(data, at) + len(key)
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
        one_data, key_start(one_data, one_at), key_size(one_data, one_at),
        two_data, key_start(two_data, two_at), key_size(two_data, two_at),
    )
