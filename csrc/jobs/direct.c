/* Reads past the page cache.
 *
 * This halves the processor time of reading uncached files and is faster than reading through the cache, both into the
 * result and into rooms. Rooms need huge pages: a disk request has at most 254 pieces of memory, so with small pages it
 * takes three times as long. */
#include "jobs/direct.h"

#define PAGE SL_DIRECT_PAGE

_Static_assert(SL_DIRECT_ROOM >= SL_CHUNK + 2 * PAGE && SL_DIRECT_ROOM % PAGE == 0,
               "a chunk and the rest of two pages");

static uint64_t down(uint64_t offset) { return offset - offset % PAGE; }

static uint64_t up(uint64_t offset) { return down(offset + PAGE - 1); }

bool sl_direct_can(const sl_job *job) {
    return job->direct > 0 && job->file != SL_MEMORY && job->grid == NULL && job->packed == NULL &&
           !sl_job_writes(job) && job->op != SL_OP_WEIGHTED; /* rows may exceed a chunk */
}

/* Reads the file's bytes [begin, end), in whole pages except at the end of the file, to `memory`. Only the bytes from
 * `needed` to `last` are used. */
static int32_t read_pages(const sl_job *job, uint64_t begin, uint64_t needed, uint64_t last, uint8_t *memory,
                          sl_error *error) {
    uint64_t end = up(last);
    uint64_t done = begin + sl_platform_read_direct(job->direct, begin, memory, end - begin);
    if (done >= last) return SL_OK;
    if (done < needed) done = needed;
    return sl_file_read(job->file, done, memory + (done - begin), last - done, error);
}

int32_t sl_direct_read(const sl_job *job, uint64_t begin, uint64_t size, uint8_t *room, const uint8_t **bytes,
                       sl_error *error) {
    uint64_t needed = job->offset + begin, first = down(needed);
    *bytes = room + (needed - first);
    return read_pages(job, first, needed, needed + size, room, error);
}

int32_t sl_direct_copy(const sl_job *job, uint64_t begin, uint64_t size, uint8_t *room, uint8_t *memory,
                       sl_error *error) {
    uint64_t needed = job->offset + begin, last = needed + size;
    uint64_t first = up(needed), end = down(last);
    bool in_place = first < end && ((uintptr_t)memory + (first - needed)) % PAGE == 0;
    if (in_place) { /* all but a part of the first and the last page */
        int32_t status = read_pages(job, first, first, end, memory + (first - needed), error);
        if (status != SL_OK) return status;
    } else
        first = end = last;
    const uint64_t parts[2][2] = {{needed, first}, {end, last}};
    for (int i = 0; i < 2; i++) {
        uint64_t from = parts[i][0], some = parts[i][1] - from;
        const uint8_t *bytes;
        if (some == 0) continue;
        int32_t status = sl_direct_read(job, from - job->offset, some, room, &bytes, error);
        if (status != SL_OK) return status;
        memcpy(memory + (from - needed), bytes, (size_t)some);
    }
    return SL_OK;
}
