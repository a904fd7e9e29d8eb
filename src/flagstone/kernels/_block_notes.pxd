# What an SST needs of its blocks: the compiled form. `_block_notes.py` has the interpreted form, see `_bytes`.

from flagstone.kernels._bytes cimport MAX_KEY_BYTES, copy, get_u16, piece, put_u16
from flagstone.kernels._memory cimport (
    Buffer, Numbers, free_buffer, free_numbers, grow_buffer, grow_numbers, new_buffer, new_numbers
)
from flagstone.kernels._siphash cimport siphash

cdef enum:
    _RECORD = 6


cdef struct Notes:
    bint want_hashes
    bint want_keys
    Numbers records
    Buffer index_keys
    Numbers hashes
    Buffer keys
    Py_ssize_t marked_hashes
    Py_ssize_t marked_keys


cdef inline Notes new_notes(bint want_hashes, bint want_keys) noexcept nogil:
    cdef Notes notes
    notes.want_hashes = want_hashes
    notes.want_keys = want_keys
    notes.records = new_numbers(16 * _RECORD)
    notes.index_keys = new_buffer(1 << 10)
    notes.hashes = new_numbers(1 << 10)
    notes.keys = new_buffer(1 << 10)
    notes.marked_hashes = notes.marked_keys = 0
    return notes


cdef inline bint have_memory(Notes* notes) noexcept nogil:
    return notes.records.data and notes.index_keys.data and notes.hashes.data and notes.keys.data


cdef inline void free_notes(Notes* notes) noexcept nogil:
    free_numbers(&notes.records)
    free_buffer(&notes.index_keys)
    free_numbers(&notes.hashes)
    free_buffer(&notes.keys)


cdef inline bint note_key(Notes* notes, const unsigned char* key, Py_ssize_t at, Py_ssize_t size) noexcept nogil:
    if notes.want_hashes:
        if notes.hashes.used == notes.hashes.room and not grow_numbers(&notes.hashes, 2 * notes.hashes.room):
            return False
        notes.hashes.data[notes.hashes.used] = siphash(key, at, size)
        notes.hashes.used += 1
    if notes.want_keys:
        if notes.keys.used + size + 2 > notes.keys.room:
            if not grow_buffer(&notes.keys, 2 * (notes.keys.used + size + 2)):
                return False
        put_u16(notes.keys.data, notes.keys.used, size)
        copy(notes.keys.data, notes.keys.used + 2, key, at, size)
        notes.keys.used += 2 + size
    return True


cdef inline void mark_keys(Notes* notes) noexcept nogil:
    notes.marked_hashes = notes.hashes.used
    notes.marked_keys = notes.keys.used


cdef inline void forget_keys(Notes* notes) noexcept nogil:
    notes.hashes.used = notes.marked_hashes
    notes.keys.used = notes.marked_keys


cdef inline bint note_block(
    Notes* notes, Py_ssize_t start, Py_ssize_t stop, const unsigned char* key, Py_ssize_t at, Py_ssize_t size,
    long long puts, long long deletes, long long merges,
) noexcept nogil:
    cdef unsigned long long* record
    if notes.records.used == notes.records.room and not grow_numbers(&notes.records, 2 * notes.records.room):
        return False
    if notes.index_keys.used + size > notes.index_keys.room:
        if not grow_buffer(&notes.index_keys, 2 * (notes.index_keys.used + size)):
            return False
    copy(notes.index_keys.data, notes.index_keys.used, key, at, size)
    notes.index_keys.used += size
    record = notes.records.data + notes.records.used
    record[0] = start
    record[1] = stop
    record[2] = size
    record[3] = puts
    record[4] = deletes
    record[5] = merges
    notes.records.used += _RECORD
    return True


cdef inline Py_ssize_t noted_blocks(Notes* notes) noexcept nogil:
    return notes.records.used // _RECORD


cdef inline tuple take_notes(Notes* notes, long long base, long long[::1] bounds):
    cdef list offsets = [], index_keys = [], counts = [], keys = []
    cdef Py_ssize_t number, size
    cdef Py_ssize_t at = 0
    cdef unsigned long long* record = notes.records.data
    cdef bytes hashes = (<unsigned char*>notes.hashes.data)[:8 * notes.hashes.used]
    for number in range(noted_blocks(notes)):
        bounds[2 * number] = record[0]
        bounds[2 * number + 1] = record[1]
        offsets.append(base + <long long>record[0])
        size = record[2]
        index_keys.append(piece(notes.index_keys.data, at, at + size))
        at += size
        counts.append(record[3])
        counts.append(record[4])
        counts.append(record[5])
        record += _RECORD
    at = 0
    while at < notes.keys.used:
        size = get_u16(notes.keys.data, at)
        keys.append(piece(notes.keys.data, at + 2, at + 2 + size))
        at += 2 + size
    notes.records.used = notes.index_keys.used = notes.hashes.used = notes.keys.used = 0
    return offsets, index_keys, counts, hashes, keys
