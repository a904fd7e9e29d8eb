# Integers and byte ranges for every kernel: the compiled form. `_bytes.py` has the interpreted form.
#
# All functions are inline, so that each kernel compiles its own copy, and the C compiler joins them with the loops
# that call them. Literals beyond 31 bits carry a C suffix: without it Cython computes with Python integers.

from libc.string cimport memcmp, memcpy

cdef extern from *:
    """
    #define FLAGSTONE_MASK32 0xFFFFFFFFULL
    #define FLAGSTONE_MASK64 0xFFFFFFFFFFFFFFFFULL
    #ifdef __GNUC__
    #define FLAGSTONE_PREFETCH(address) __builtin_prefetch(address)
    #else
    #define FLAGSTONE_PREFETCH(address) ((void)(address))
    #endif

    /* The C compiler does not join eight single bytes to one access by itself. */
    #if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    static inline unsigned long long flagstone_load(const unsigned char* data) {
        unsigned long long value;
        memcpy(&value, data, 8);
        return value;
    }
    static inline void flagstone_store(unsigned char* out, unsigned long long value) {
        memcpy(out, &value, 8);
    }
    #define FLAGSTONE_SWAP(value) __builtin_bswap64(value)
    #define FLAGSTONE_EQUAL_BYTES(differences) (__builtin_ctzll(differences) >> 3)
    #else
    static inline unsigned long long flagstone_load(const unsigned char* data) {
        unsigned long long value = 0;
        int index;
        for (index = 7; index >= 0; index--)
            value = value << 8 | data[index];
        return value;
    }
    static inline void flagstone_store(unsigned char* out, unsigned long long value) {
        int index;
        for (index = 0; index < 8; index++, value >>= 8)
            out[index] = (unsigned char)value;
    }
    static inline unsigned long long FLAGSTONE_SWAP(unsigned long long value) {
        unsigned char bytes[8];
        int index;
        for (index = 7; index >= 0; index--, value >>= 8)
            bytes[index] = (unsigned char)value;
        return flagstone_load(bytes);
    }
    static inline int FLAGSTONE_EQUAL_BYTES(unsigned long long differences) {
        int count = 0;
        for (; (differences & 0xFF) == 0; differences >>= 8)
            count++;
        return count;
    }
    #endif
    """
    unsigned long long _load "flagstone_load"(const unsigned char* data) noexcept nogil
    void _store "flagstone_store"(unsigned char* out, unsigned long long value) noexcept nogil
    unsigned long long _swap "FLAGSTONE_SWAP"(unsigned long long value) noexcept nogil
    int _equal_bytes "FLAGSTONE_EQUAL_BYTES"(unsigned long long differences) noexcept nogil
    void _prefetch "FLAGSTONE_PREFETCH"(const void* address) noexcept nogil
    const unsigned long long MASK32 "FLAGSTONE_MASK32"
    const unsigned long long MASK64 "FLAGSTONE_MASK64"

cdef enum:
    MAX_KEY_BYTES = 65_535
    LENGTH_CUT_OFF = -1
    LENGTH_TOO_LARGE = -2


cdef inline unsigned long long get_u64(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return _swap(_load(data + at))


cdef inline long long get_i64(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return <long long>get_u64(data, at)


cdef inline void put_u64(unsigned char* out, Py_ssize_t at, unsigned long long value) noexcept nogil:
    _store(out + at, _swap(value))


cdef inline int get_u16(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return (data[at] << 8) | data[at + 1]


cdef inline void put_u16(unsigned char* out, Py_ssize_t at, Py_ssize_t value) noexcept nogil:
    out[at] = (value >> 8) & 0xFF
    out[at + 1] = value & 0xFF


cdef inline unsigned int get_u32(const unsigned char* data, Py_ssize_t at) noexcept nogil:
    return data[at] | (data[at + 1] << 8) | (data[at + 2] << 16) | (<unsigned int>data[at + 3] << 24)


cdef inline unsigned long long get_big(const unsigned char* data, Py_ssize_t at, int size) noexcept nogil:
    cdef unsigned long long value = 0
    cdef int index
    for index in range(size):
        value = (value << 8) | data[at + index]
    return value


cdef inline void put_big(unsigned char* out, Py_ssize_t at, unsigned long long value, int size) noexcept nogil:
    cdef int index
    for index in range(size):
        out[at + index] = (value >> (8 * (size - 1 - index))) & 0xFF


cdef inline unsigned long long get_little(const unsigned char* data, Py_ssize_t at, int size) noexcept nogil:
    cdef unsigned long long value = 0
    cdef int index
    if size == 8:
        return _load(data + at)
    for index in range(size):
        value |= <unsigned long long>data[at + index] << (8 * index)
    return value


cdef inline void put_little(unsigned char* out, Py_ssize_t at, unsigned long long value, int size) noexcept nogil:
    cdef int index
    if size == 8:
        _store(out + at, value)
        return
    for index in range(size):
        out[at + index] = (value >> (8 * index)) & 0xFF


cdef inline Py_ssize_t varint_size(long long value) noexcept nogil:
    cdef Py_ssize_t size = 1
    while value >= 0x80:
        value >>= 7
        size += 1
    return size


cdef inline Py_ssize_t put_varint(unsigned char* out, Py_ssize_t at, long long value) noexcept nogil:
    while value >= 0x80:
        out[at] = (value & 0x7F) | 0x80
        value >>= 7
        at += 1
    out[at] = <unsigned char>value
    return at + 1


cdef inline long long get_length(const unsigned char* data, Py_ssize_t at, Py_ssize_t end) noexcept nogil:
    cdef long long value = 0
    cdef long long size = 0
    cdef long long byte
    while size < 5:
        if at >= end:
            return LENGTH_CUT_OFF
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * size)
        size += 1
        if byte < 0x80:
            return LENGTH_TOO_LARGE if value > <long long>MASK32 else (size << 32) | value
    return LENGTH_TOO_LARGE


cdef inline void copy(
    unsigned char* out, Py_ssize_t at, const unsigned char* source, Py_ssize_t start, Py_ssize_t size
) noexcept nogil:
    memcpy(out + at, source + start, size)


cdef inline void prefetch(const unsigned char* data, Py_ssize_t at, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t line = 0
    while line < size:
        _prefetch(data + at + line)
        line += 64


cdef inline bytes piece(const unsigned char* data, Py_ssize_t start, Py_ssize_t stop):
    return data[start:stop]


cdef inline int differ(
    const unsigned char* one, Py_ssize_t one_at, const unsigned char* two, Py_ssize_t two_at, Py_ssize_t size
) noexcept nogil:
    return memcmp(one + one_at, two + two_at, size)


cdef inline Py_ssize_t common_prefix(
    const unsigned char* one, Py_ssize_t one_at, const unsigned char* two, Py_ssize_t two_at, Py_ssize_t size
) noexcept nogil:
    cdef Py_ssize_t at = 0
    cdef unsigned long long differences
    while at + 8 <= size:
        differences = _load(one + one_at + at) ^ _load(two + two_at + at)
        if differences:
            return at + _equal_bytes(differences)
        at += 8
    while at < size and one[one_at + at] == two[two_at + at]:
        at += 1
    return at


cdef inline int compare(
    const unsigned char* one, Py_ssize_t one_at, Py_ssize_t one_size,
    const unsigned char* two, Py_ssize_t two_at, Py_ssize_t two_size,
) noexcept nogil:
    cdef Py_ssize_t shortest = one_size if one_size < two_size else two_size
    cdef Py_ssize_t at = common_prefix(one, one_at, two, two_at, shortest)
    if at < shortest:
        return -1 if one[one_at + at] < two[two_at + at] else 1
    return (one_size > two_size) - (one_size < two_size)
