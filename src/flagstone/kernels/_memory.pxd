# Memory that grows without the interpreter's lock: the compiled form. `_memory.py` has the interpreted form.

from libc.stdlib cimport free, malloc, realloc


cdef struct Buffer:
    unsigned char* data
    Py_ssize_t used
    Py_ssize_t room


cdef struct Numbers:
    unsigned long long* data
    Py_ssize_t used
    Py_ssize_t room


cdef inline Buffer new_buffer(Py_ssize_t room) noexcept nogil:
    cdef Buffer buffer
    buffer.data = <unsigned char*>malloc(room)
    buffer.used = 0
    buffer.room = room
    return buffer


cdef inline Numbers new_numbers(Py_ssize_t room) noexcept nogil:
    cdef Numbers numbers
    numbers.data = <unsigned long long*>malloc(8 * room)
    numbers.used = 0
    numbers.room = room
    return numbers


cdef inline bint grow_buffer(Buffer* buffer, Py_ssize_t room) noexcept nogil:
    cdef unsigned char* data = <unsigned char*>realloc(buffer.data, room)
    if data == NULL:
        return False
    buffer.data = data
    buffer.room = room
    return True


cdef inline bint grow_numbers(Numbers* numbers, Py_ssize_t room) noexcept nogil:
    cdef unsigned long long* data = <unsigned long long*>realloc(numbers.data, 8 * room)
    if data == NULL:
        return False
    numbers.data = data
    numbers.room = room
    return True


cdef inline void free_buffer(Buffer* buffer) noexcept nogil:
    free(buffer.data)


cdef inline void free_numbers(Numbers* numbers) noexcept nogil:
    free(numbers.data)
