# SipHash-1-3 with an all-zero key: the compiled form. `_siphash.py` has the interpreted form, see `_bytes`.

from flagstone.kernels._bytes cimport get_little

cdef inline unsigned long long rotate(unsigned long long value, int bits) noexcept nogil:
    return (value << bits) | (value >> (64 - bits))


cdef inline unsigned long long siphash(const unsigned char* data, Py_ssize_t at, Py_ssize_t size) noexcept nogil:
    cdef unsigned long long v0 = 0x736F6D6570736575ULL
    cdef unsigned long long v1 = 0x646F72616E646F6DULL
    cdef unsigned long long v2 = 0x6C7967656E657261ULL
    cdef unsigned long long v3 = 0x7465646279746573ULL
    cdef unsigned long long word
    cdef Py_ssize_t turn
    cdef Py_ssize_t words = size // 8
    # words of data, then the last partial word with the length on top, then three rounds without a word
    for turn in range(words + 4):
        if turn < words:
            word = get_little(data, at + 8 * turn, 8)
        elif turn == words:
            word = get_little(data, at + 8 * words, size & 7)
            word |= <unsigned long long>(size & 0xFF) << 56
        else:
            word = 0
            if turn == words + 1:
                v2 ^= 0xFF
        v3 ^= word
        v0 += v1
        v2 += v3
        v1 = rotate(v1, 13) ^ v0
        v3 = rotate(v3, 16) ^ v2
        v0 = rotate(v0, 32)
        v2 += v1
        v0 += v3
        v1 = rotate(v1, 17) ^ v2
        v3 = rotate(v3, 21) ^ v0
        v2 = rotate(v2, 32)
        v0 ^= word
    return v0 ^ v1 ^ v2 ^ v3
