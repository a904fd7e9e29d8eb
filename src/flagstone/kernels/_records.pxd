# Records made without a call, numbers of 128 bits, and marked bytes: the compiled form. `_records.py` has the
# interpreted form.

from cpython.long cimport PyLong_AsUnsignedLongLongMask
from cpython.object cimport PyTypeObject

cdef extern from "Python.h":
    PyTypeObject* Py_TYPE(object)
    object PyType_GenericAlloc(PyTypeObject*, Py_ssize_t)
    void PyObject_GC_UnTrack(void*)
    object _PyLong_FromByteArray(const unsigned char*, size_t, int, int)

cdef enum:
    MAX_SLOTS = 32


cdef struct Slots:
    unsigned long long held[MAX_SLOTS]


cdef inline Slots new_slots() noexcept nogil:
    cdef Slots slots
    cdef int index
    for index in range(MAX_SLOTS):
        slots.held[index] = 0
    return slots


cdef inline object new_record(object kind):
    return PyType_GenericAlloc(<PyTypeObject*>kind, 0)


cdef inline int set_member(object record, object member, object value) except -1:
    return Py_TYPE(member).tp_descr_set(member, record, value)


cdef inline object get_member(object record, object member):
    return Py_TYPE(member).tp_descr_get(member, record, None)


cdef inline int finish_record(object record) except -1:
    PyObject_GC_UnTrack(<void*>record)
    return 0


cdef inline object wide_number(unsigned long long high, unsigned long long low):
    cdef unsigned char stored[16]
    cdef int index
    for index in range(8):
        stored[index] = (low >> (8 * index)) & 0xFF
        stored[8 + index] = (high >> (8 * index)) & 0xFF
    return _PyLong_FromByteArray(stored, 16, 1, 0)


cdef inline unsigned long long wide_high(object number) except? 1:
    return <unsigned long long>(number >> 64)


cdef inline unsigned long long wide_low(object number) except? 1:
    return PyLong_AsUnsignedLongLongMask(number)


cdef inline int mark_bytes(unsigned char* marks, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    cdef unsigned char before = 0
    cdef Py_ssize_t at
    for at in range(start, stop):
        before |= marks[at]
        marks[at] = 1
    return before
