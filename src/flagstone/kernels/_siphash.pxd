# SipHash-1-3 with an all-zero key: the compiled form. `_siphash.py` has the interpreted form, see `_bytes`.

from flagstone.kernels._bytes cimport get_little

cdef inline unsigned long long rotate(unsigned long long value, int bits) noexcept nogil:
    return (value << bits) | (value >> (64 - bits))


cdef inline void mix(unsigned long long* state, unsigned long long word) noexcept nogil:
    state[3] ^= word
    state[0] += state[1]
    state[2] += state[3]
    state[1] = rotate(state[1], 13) ^ state[0]
    state[3] = rotate(state[3], 16) ^ state[2]
    state[0] = rotate(state[0], 32)
    state[2] += state[1]
    state[0] += state[3]
    state[1] = rotate(state[1], 17) ^ state[2]
    state[3] = rotate(state[3], 21) ^ state[0]
    state[2] = rotate(state[2], 32)
    state[0] ^= word


cdef inline unsigned long long siphash(const unsigned char* data, Py_ssize_t at, Py_ssize_t size) noexcept nogil:
    cdef unsigned long long state[4]
    cdef Py_ssize_t turn
    cdef Py_ssize_t words = size // 8
    state[0] = 0x736F6D6570736575ULL
    state[1] = 0x646F72616E646F6DULL
    state[2] = 0x6C7967656E657261ULL
    state[3] = 0x7465646279746573ULL
    for turn in range(words):
        mix(state, get_little(data, at + 8 * turn, 8))
    # The last partial word, with the length on top.
    mix(state, get_little(data, at + 8 * words, size & 7) | <unsigned long long>(size & 0xFF) << 56)
    state[2] ^= 0xFF
    for turn in range(3):
        mix(state, 0)
    return state[0] ^ state[1] ^ state[2] ^ state[3]
