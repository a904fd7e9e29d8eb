# The checksum of blocks: the compiled form. `_crc32.py` has the interpreted form, see `_bytes`.
#
# Where the processor multiplies without carries, 64 bytes are folded in one step: the four registers hold a number that
# leaves the same remainder as everything read so far, and multiplying it by a power of x moves it 64 bytes on. What the
# last step leaves is 16 bytes, whose checksum is that of the whole. Other processors look up sixteen bytes a step.

cdef extern from *:
    """
    #include <stddef.h>
    #include <string.h>

    static unsigned int flagstone_crc_table[16][256];
    static int flagstone_crc_folds = 0;

    static unsigned int flagstone_crc_by_table(unsigned int crc, const unsigned char* data, size_t size) {
        while (size >= 16) {
            unsigned int word[4];
            int turn;
            for (turn = 0; turn < 4; turn++)
                word[turn] = data[4 * turn] | data[4 * turn + 1] << 8 | data[4 * turn + 2] << 16
                    | (unsigned int)data[4 * turn + 3] << 24;
            word[0] ^= crc;
            crc = 0;
            for (turn = 0; turn < 4; turn++)
                crc ^= flagstone_crc_table[15 - 4 * turn][word[turn] & 0xFF]
                    ^ flagstone_crc_table[14 - 4 * turn][word[turn] >> 8 & 0xFF]
                    ^ flagstone_crc_table[13 - 4 * turn][word[turn] >> 16 & 0xFF]
                    ^ flagstone_crc_table[12 - 4 * turn][word[turn] >> 24];
            data += 16;
            size -= 16;
        }
        while (size--)
            crc = crc >> 8 ^ flagstone_crc_table[0][(crc ^ *data++) & 0xFF];
        return crc;
    }

    #if defined(__x86_64__) && defined(__GNUC__)
    #include <immintrin.h>
    #define FLAGSTONE_FOLDING 1

    __attribute__((target("pclmul")))
    static inline __m128i flagstone_fold(__m128i held, __m128i by, __m128i more) {
        __m128i low = _mm_clmulepi64_si128(held, by, 0x00);
        __m128i high = _mm_clmulepi64_si128(held, by, 0x11);
        return _mm_xor_si128(_mm_xor_si128(low, high), more);
    }

    /* For 64 bytes and more. The factors are x to the power of 544, 480, 160 and 96, modulo the polynomial, mirrored. */
    __attribute__((target("pclmul")))
    static unsigned int flagstone_crc_by_folding(unsigned int crc, const unsigned char* data, size_t size) {
        const __m128i by64 = _mm_set_epi64x(0x1C6E41596LL, 0x154442BD4LL);
        const __m128i by16 = _mm_set_epi64x(0x0CCAA009ELL, 0x1751997D0LL);
        const __m128i* next = (const __m128i*)data;
        unsigned char rest[16];
        __m128i a = _mm_xor_si128(_mm_loadu_si128(next), _mm_cvtsi32_si128((int)crc));
        __m128i b = _mm_loadu_si128(next + 1);
        __m128i c = _mm_loadu_si128(next + 2);
        __m128i d = _mm_loadu_si128(next + 3);
        for (next += 4, size -= 64; size >= 64; next += 4, size -= 64) {
            a = flagstone_fold(a, by64, _mm_loadu_si128(next));
            b = flagstone_fold(b, by64, _mm_loadu_si128(next + 1));
            c = flagstone_fold(c, by64, _mm_loadu_si128(next + 2));
            d = flagstone_fold(d, by64, _mm_loadu_si128(next + 3));
        }
        d = flagstone_fold(flagstone_fold(flagstone_fold(a, by16, b), by16, c), by16, d);
        for (; size >= 16; next++, size -= 16)
            d = flagstone_fold(d, by16, _mm_loadu_si128(next));
        _mm_storeu_si128((__m128i*)rest, d);
        return flagstone_crc_by_table(flagstone_crc_by_table(0, rest, 16), (const unsigned char*)next, size);
    }
    #endif

    static void flagstone_crc_prepare(void) {
        unsigned int at, turn;
        for (at = 0; at < 256; at++) {
            unsigned int value = at;
            for (turn = 0; turn < 8; turn++)
                value = value >> 1 ^ (value & 1 ? 0xEDB88320U : 0);
            flagstone_crc_table[0][at] = value;
        }
        for (turn = 1; turn < 16; turn++)
            for (at = 0; at < 256; at++) {
                unsigned int value = flagstone_crc_table[turn - 1][at];
                flagstone_crc_table[turn][at] = value >> 8 ^ flagstone_crc_table[0][value & 0xFF];
            }
    #ifdef FLAGSTONE_FOLDING
        __builtin_cpu_init();
        flagstone_crc_folds = __builtin_cpu_supports("pclmul") != 0;
    #endif
    }

    static unsigned int flagstone_crc32(const unsigned char* data, Py_ssize_t at, Py_ssize_t size) {
    #ifdef FLAGSTONE_FOLDING
        if (flagstone_crc_folds && size >= 64)
            return ~flagstone_crc_by_folding(~0U, data + at, (size_t)size);
    #endif
        return ~flagstone_crc_by_table(~0U, data + at, (size_t)size);
    }
    """
    void _prepare "flagstone_crc_prepare"() noexcept nogil
    unsigned int _crc32 "flagstone_crc32"(const unsigned char* data, Py_ssize_t at, Py_ssize_t size) noexcept nogil


cdef inline void prepare_crc32() noexcept nogil:
    _prepare()


cdef inline unsigned int crc32(const unsigned char* data, Py_ssize_t at, Py_ssize_t size) noexcept nogil:
    return _crc32(data, at, size)
