# Columns as pointers: the compiled form. `_views.py` has the interpreted form, see `_bytes`.


cdef inline const unsigned char* bytes_of(const unsigned char[::1] column) noexcept:
    return &column[0]


cdef inline unsigned char* room_of(unsigned char[::1] column) noexcept:
    return &column[0]
