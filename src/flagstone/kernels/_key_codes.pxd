# The codes of order-preserving keys: the compiled form. `_key_codes.py` has the interpreted form, see `_bytes`.

cdef extern from *:
    """
    #define FLAGSTONE_SIGN32 0x80000000ULL
    #define FLAGSTONE_SIGN64 0x8000000000000000ULL
    #define FLAGSTONE_INFINITY 0x7FF0000000000000ULL
    #define FLAGSTONE_NAN 0x7FF8000000000000ULL
    """
    const unsigned long long SIGN32 "FLAGSTONE_SIGN32"
    const unsigned long long SIGN64 "FLAGSTONE_SIGN64"
    const unsigned long long INFINITY_BITS "FLAGSTONE_INFINITY"
    const unsigned long long NAN_BITS "FLAGSTONE_NAN"

cdef enum:
    NULL_CODE = 0x05
    FALSE = 0x10
    NEGATIVE = 0x28
    POSITIVE = 0x29
    FLOAT = 0x38
    DECIMAL_NEGATIVE = 0x40
    DECIMAL_ZERO = 0x41
    DECIMAL_POSITIVE = 0x42
    DATE = 0x48
    BOOLEAN = 0x10
    SIGNED = 0x28
    UNSIGNED = 0x29
    BIAS = 0x8000
    MAX_COLUMN_BYTES = 0x7FFFFFFF


cdef inline int number_width(unsigned long long value) noexcept nogil:
    cdef int width = 0
    while value:
        value >>= 8
        width += 1
    return width
